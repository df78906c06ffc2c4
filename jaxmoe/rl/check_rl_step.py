# SPDX-License-Identifier: Apache-2.0
"""Checks of a step's arguments on the host, before it is jitted: algorithm, arrays, state.

Next: jaxmoe/rl/update.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.engine_experts import check_engine_experts
from jaxmoe.batches.sharing_from_config import check_shared_unit
from jaxmoe.config import require
from jaxmoe.model.check_ops import check_router, function_name
from jaxmoe.model.moe.router import takes_parameter
from jaxmoe.rl.algorithm import ARRAYS, Algorithm
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import TrainState
from jaxmoe.rl.turns import check_turns
from jaxmoe.rl.validate import check_algorithm
from jaxmoe.shapes import Params


def check_rl_step(
    state: TrainState,
    batch: Batch,
    minibatches: Minibatches | None = None,
    base: Params | None = None,
    teacher: Params | None = None,
    *,
    algorithm: Algorithm,
    scorer: Scorer,
    microbatches: int = 1,
    **_: Any,
) -> None:
    """Check the arguments of `rl_step`, before it is jitted.

    Raises ConfigError for an algorithm that cannot work, or arrays that do not fit it. Token ids
    outside the vocabulary are found only in host arrays.
    """
    full_state = replace(state, frozen=replace(state.frozen, base=base, teacher=teacher))
    check_inputs(full_state, batch, minibatches, algorithm, scorer, microbatches)
    m = scorer.model
    routing = (m.n_layers, m.n_experts, m.experts_per_token)
    recorded = scorer.recorded_sizes()
    check_algorithm(algorithm, batch.samples_per_prompt, recorded, routing, batch)


def check_inputs(
    state: TrainState,
    batch: Batch,
    minibatches: Minibatches | None,
    a: Algorithm,
    scorer: Scorer,
    microbatches: int,
) -> None:
    """Check the arrays of a step. Raises ConfigError with the name of the first invalid one.

    Ids are checked only in host arrays.
    """
    check_tokens(batch, scorer.model.vocab_size)
    check_router(scorer.ops.router, scorer.model)
    rows, r = len(batch.tokens_BT), batch.samples_per_prompt
    shapes = dict.fromkeys(
        ("positions_BT", "segment_ids_BT", "loss_mask_BT", "rollout_logp_BT"),
        np.shape(batch.tokens_BT),
    ) | {"rewards_B": (rows,)}
    if batch.rewards_BT is not None:
        shapes["rewards_BT"] = np.shape(batch.tokens_BT)
    for name, shape in shapes.items():
        actual = np.shape(getattr(batch, name))
        require(actual == shape, f"batch.{name} must have shape {shape}, got {actual}.")
    check_engine_experts(batch, scorer.model)
    require(
        batch.loss_mask_BT.dtype == bool,
        f"batch.loss_mask_BT must be bool, got {batch.loss_mask_BT.dtype}. Try mask > 0.",
    )
    require(
        r > 0 and rows % r == 0,
        f"a batch must consist of groups of samples_per_prompt ({r}) rows, got {rows} rows.",
    )
    check_turns(batch)
    check_shared_unit(batch.packing, scorer.ops.attend)
    updates = 1 if minibatches is None else len(minibatches.rows_UB)
    require(
        updates == a.updates,
        f"{a.epochs} epochs of {a.minibatches} minibatches need as many minibatches, got "
        f"{'none' if minibatches is None else updates}. Try batch, minibatches = "
        "split_minibatches(batch, algorithm, seed=(0, step)), and rl_step(state, batch, "
        "minibatches, …).",
    )
    require(
        batch.packing is not None or rows % microbatches == 0,
        f"microbatches ({microbatches}) must divide the batch's {rows} rows.",
    )
    require(
        not a.needs_reference
        or state.frozen.reference is not None
        or state.frozen.base is not None,
        "a loss that takes ref_logp_BT needs a reference, and the state has none. Try "
        "init_state(trained, tx, Frozen(reference=params)).",
    )
    check_teacher(state, batch, a, scorer)
    replay, router = scorer.replay, scorer.ops.router
    require(
        not replay or takes_parameter(router, "indices_BTA"),
        f"Scorer(replay={replay!r}) needs a router that takes indices_BTA=None, and "
        f"{function_name(router)} does not. Try ops = replace(ops, router=replay_routing).",
    )
    require(
        replay != "R3" or batch.routed_experts_BTLA is not None,
        "Scorer(replay='R3') needs the engine's experts, and batch.routed_experts_BTLA is None. "
        "Try rollout_batch(…, n_experts=…).",
    )
    require(
        replay != "R2" or a.updates > 1,
        "Scorer(replay='R2') needs several updates per batch, got one: it uses the experts of its "
        "own forward. Try Scorer(replay='').",
    )
    for name, x in batch.extra.items():
        require(
            np.shape(x)[:1] == (rows,),
            f"batch.extra[{name!r}] must have one row per sequence ({rows}), got shape "
            f"{np.shape(x)}. An array of the complete batch belongs in Batch(shared={{…}}).",
        )
    # A caller may count the steps itself; `share_scalars` lets its step take precedence.
    reserved = {name for names in ARRAYS.values() for name in names}
    repeated = {*reserved - {"step"}, *batch.extra} & {*batch.shared} | reserved & {*batch.extra}
    require(
        not repeated,
        f"arrays in batch.extra and batch.shared must have names of their own, got "
        f"{sorted(repeated)}; the step has {', '.join(sorted(reserved))}.",
    )
    require(
        a.critic == "none" or state.params.critic is not None,
        f"critic={a.critic} needs a critic's parameters, and the state has none. Try "
        "init_state(Trained(params, init_critic(params, cfg.model, dtype, own_backbone=…)), tx).",
    )


def check_teacher(state: TrainState, batch: Batch, a: Algorithm, scorer: Scorer) -> None:
    """Raise ConfigError if the loss takes a teacher's arrays, and the step has no such teacher."""
    frozen, logp_BT = state.frozen, batch.teacher_logp_BT
    lists = batch.teacher_top_ids_BTK, batch.teacher_top_logp_BTK
    has_weights = any(x is not None for x in (frozen.teacher, frozen.reference, frozen.base))
    has_model = scorer.teacher is not None and has_weights
    lacks_list = a.needs_divergences and lists[0] is None
    require(
        has_model or not (lacks_list or (a.needs_teacher_logp and logp_BT is None)),
        "a loss that takes a teacher's arrays needs a teacher, and the step has none. Try "
        "Scorer(teacher=Scorer(model, ops)) and rl_step(state, batch, None, None, params, …).",
    )
    require(
        scorer.teacher is None or scorer.teacher.model.vocab_size == scorer.model.vocab_size,
        "a teacher must have the vocabulary of the policy, got "
        f"{scorer.teacher and scorer.teacher.model.vocab_size} words for "
        f"{scorer.model.vocab_size}.",
    )
    require(
        logp_BT is None or logp_BT.shape == np.shape(batch.tokens_BT),
        f"batch.teacher_logp_BT must have shape {np.shape(batch.tokens_BT)}, got "
        f"{getattr(logp_BT, 'shape', None)}.",
    )
    ids_shape, top_shape = (getattr(x, "shape", None) for x in lists)
    require(
        ids_shape == top_shape and (not ids_shape or ids_shape[:-1] == np.shape(batch.tokens_BT)),
        "batch.teacher_top_ids_BTK and teacher_top_logp_BTK must both have K words for each of the "
        f"{np.shape(batch.tokens_BT)} tokens, got {ids_shape} and {top_shape}.",
    )


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise ConfigError unless tokens are [B, T], and host arrays have valid values.

    Traced arrays have no values, and a gather clamps invalid ids silently. Call this before a
    jitted step if the tokens come from another source.
    """
    tokens_BT = batch.tokens_BT
    require(
        np.ndim(tokens_BT) == 2,
        f"batch.tokens_BT must be [B, T], got shape {np.shape(tokens_BT)}. Try tokens[None].",
    )
    if isinstance(tokens_BT, np.ndarray):
        bad = np.argwhere((tokens_BT < 0) | (tokens_BT >= vocab_size))
        require(
            not len(bad),
            f"batch.tokens_BT must be ids from 0 to {vocab_size - 1} (model.vocab_size), got "
            + "".join(f"{tokens_BT[b, t]} at [{b}, {t}]" for b, t in bad[:1])
            + ".",
        )
    mask_BT = batch.loss_mask_BT
    if isinstance(mask_BT, np.ndarray) and mask_BT.ndim == 2:
        require(
            not mask_BT[:, 0].any(),
            "batch.loss_mask_BT must be False in column 0: no token precedes the first one of a "
            "row, so its log-prob is the constant 0 and has no gradient. Begin rows with a prompt "
            "of at least one token.",
        )
