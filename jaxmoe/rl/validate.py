# SPDX-License-Identifier: Apache-2.0
"""Checks of algorithms and of a step's arrays, for everything that the step's arithmetic assumes.

Next: jaxmoe/rl/algorithm.py.
"""

import traceback
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ConfigError, require
from jaxmoe.config.function_specs import array_parameters
from jaxmoe.losses import kl_k1
from jaxmoe.model.check_ops import check_router, function_name
from jaxmoe.model.router import takes_parameter
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.engine_experts import check_engine_experts
from jaxmoe.rl.loss import compute_loss_weights, estimate_advantages, sum_terms
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.sharing_from_config import check_shared_unit
from jaxmoe.rl.state import TrainState
from jaxmoe.rl.step import share_scalars
from jaxmoe.rl.terms import OLD_ROUTING, TERM_ARRAYS, Term, reference_kl

# Trailing sizes of arrays that have more axes than [B, T]; all differ, so that a swap is found.
_LAYERS, _EXPERTS, _ACTIVE = 11, 7, 5


def check_algorithm(
    a: Algorithm,
    samples: int,
    recorded: Mapping[str, tuple[int, ...]] | None = None,
    routing: tuple[int, int, int] = (_LAYERS, _EXPERTS, _ACTIVE),
) -> None:
    """Check an algorithm by tracing the step's arithmetic on abstract arrays.

    Args:
        samples: rows per prompt.
        recorded: arrays that `Ops.record` returns, [B, T, …], by name: the sizes after B and T.
            By default the router's are assumed, and a term that takes an array of another name is
            checked only when a step is traced.
        routing: number of layers, experts, and active experts.
    Raises ConfigError with the message of a function that fails, or if functions do not fit
    together.
    """
    r = samples
    needs_values = "values_BT" in array_parameters(a.advantages)
    require(
        not needs_values or a.critic != "none",
        f"loss.advantages: {function_name(a.advantages)} takes values_BT, and there is no critic. "
        "Try --set critic.backbone=own.",
    )
    require(
        needs_values or a.critic == "none",
        f"critic.backbone={a.critic} needs advantages that take values_BT; "
        f"{function_name(a.advantages)} does not. Try --set loss.advantages=gae, or --set "
        "critic.backbone=none.",
    )
    require(
        a.critic == "none" or any("values_BT" in array_parameters(term.fn) for term in a.terms),
        f"critic={a.critic} needs a term that trains it. Try terms=(value_term(),).",
    )
    require(
        a.updates == 1
        or a.old_logp != "detached"
        or "old_logp_BT" not in array_parameters(a.objective),
        f"loss.old_logp=detached needs one update per batch, got {a.epochs} epochs of "
        f"{a.minibatches} minibatches: after the first update the batch is off-policy and its "
        "ratio is not 1. Try --set loss.old_logp=recomputed.",
    )
    # With several updates, something must compare the current policy with the one that sampled.
    ratio_arrays = {"old_logp_BT", "rollout_logp_BT"} & set(array_parameters(a.objective))
    corrects_each_update = a.rollout_correction and a.old_logp != "recomputed"
    require(
        a.updates == 1 or bool(ratio_arrays) or bool(corrects_each_update),
        f"loss.objective: {function_name(a.objective)} has no ratio, and there are {a.epochs} "
        f"epochs of {a.minibatches} minibatches: after the first update nothing corrects for "
        "tokens of an older policy. Try --set loss.objective=ppo_clip, or --set loss.epochs=1 "
        "--set loss.minibatches=1.",
    )
    require(
        not any(_is_kl_k1(term) for term in a.terms),
        "loss.kl=kl_k1 has an expected gradient of 0, so it does not act in the loss. Try "
        "--set loss.kl=kl_k3_with_k2_gradient, or --set loss.kl_in=reward.",
    )
    require(
        r > 1 or "rewards_PR" not in array_parameters(a.advantages),
        f"loss.advantages: {function_name(a.advantages)} compares the samples of a prompt, and "
        f"rollout.samples_per_prompt is {r}. Try --set rollout.samples_per_prompt=8. In Python it "
        "is Batch(samples_per_prompt=8).",
    )

    def trace_step() -> bool:
        """Return True if the correction weights tokens."""
        batch, out = _abstract_batch(a, r, recorded, routing)
        batch = compute_loss_weights(share_scalars(estimate_advantages(batch, a), jnp.int32(0)), a)
        _, aux = sum_terms(_drop_unknown_terms(a, out), batch, out)
        return aux.rows["correction"].weights_BT is not None

    # eval_shape returns only shapes, so the result, a Python bool, leaves the trace in a list.
    weights: list[bool] = []
    try:
        jax.eval_shape(lambda: weights.append(trace_step()))
    except ConfigError:
        raise  # it says what to type
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"loss: {' '.join(str(error).split())}") from error  # one line
    # Any other error is of a function itself, such as a KeyError of a dict of its own.
    except Exception as error:
        raise ConfigError(
            f"loss: each function must run on the arrays of a step; {_describe_error(error)}. "
            "Correct the function."
        ) from error
    require(
        not (a.old_logp == "rollout" and weights[0]),
        "loss.old_logp=rollout and importance weights in loss.rollout_correction correct the same "
        "mismatch twice. Try --set loss.old_logp=recomputed, or a rejection alone.",
    )


def _describe_error(error: Exception) -> str:
    """Type, text and line of an error; the line is the last one outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    written = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text:.300} ({written[-1].filename}:{written[-1].lineno}, in {written[-1].name})"


def _is_kl_k1(term: Term) -> bool:
    kl = getattr(term.fn, "keywords", {}).get("kl")
    is_kl = getattr(term.fn, "func", None) is reference_kl
    return is_kl and term.weight != 0.0 and getattr(kl, "func", kl) is kl_k1


def _abstract_batch(
    a: Algorithm,
    r: int,
    recorded: Mapping[str, tuple[int, ...]] | None,
    routing: tuple[int, int, int],
) -> tuple[Batch, dict[str, jax.Array]]:
    """Return a scored batch and the results of a forward, with sizes that all differ."""
    # p, r and t differ, and t is larger than p·r, so that a function which transposes its result or
    # mixes up two axes returns another shape and is refused.
    (layers, experts, active), p = routing, 3 if r == 2 else 2
    t = p * r + 1
    x_BT, mask_BT = jnp.zeros((p * r, t)), jnp.ones((p * r, t), bool)
    has_critic = a.critic != "none"
    batch = Batch(
        tokens_BT=x_BT,
        positions_BT=x_BT,
        segment_ids_BT=x_BT,
        loss_mask_BT=mask_BT,
        rollout_logp_BT=x_BT,
        rewards_B=x_BT[:, 0],
        samples_per_prompt=r,
        routed_experts_BTLA=jnp.zeros((p * r, t, layers, active), jnp.int32),
        shared={
            "load_LE": jnp.zeros((layers, experts), jnp.int32),
            "experts_E": jnp.zeros(experts, jnp.int32),
        },
        old_experts_BTLA=jnp.zeros((p * r, t, layers, active), jnp.int32),
        old_router_logits_BTLE=jnp.zeros((p * r, t, layers, experts)),
        old_logp_BT=x_BT if a.needs_scoring else None,
        ref_logp_BT=x_BT if a.needs_reference else None,
        old_values_BT=x_BT if has_critic else None,
        bootstrap_B=x_BT[:, 0] if has_critic else None,
    )
    if recorded is None:
        recorded = {"router_logits_BTLE": (layers, experts), "experts_BTLA": (layers, active)}
    out = {
        name: jnp.zeros((p * r, t, *sizes), jnp.int32 if name == "experts_BTLA" else None)
        for name, sizes in recorded.items()
    }
    out |= {"logp_BT": x_BT, "entropy_BT": x_BT} | ({"values_BT": x_BT} if has_critic else {})
    return batch, out


def _drop_unknown_terms(a: Algorithm, out: Mapping[str, jax.Array]) -> Algorithm:
    """Return the algorithm without terms that take arrays of a batch which is not known yet."""
    available = {*TERM_ARRAYS, *out}
    terms = [term for term in a.terms if set(array_parameters(term.fn)) <= available]
    return replace(a, terms=tuple(terms))


def check_inputs(
    state: TrainState,
    batch: Batch,
    minibatches: Minibatches | None,
    a: Algorithm,
    scorer: Scorer,
    microbatches: int,
) -> None:
    """Check the arrays of a step. Raises ConfigError with the name of the first invalid one.

    Shapes are checked while jax traces; `check_tokens` can check ids only in host arrays.
    """
    check_tokens(batch, scorer.model.vocab_size)
    check_router(scorer.ops.router, scorer.model)
    rows, r = len(batch.tokens_BT), batch.samples_per_prompt
    shapes = dict.fromkeys(
        ("positions_BT", "segment_ids_BT", "loss_mask_BT", "rollout_logp_BT"),
        np.shape(batch.tokens_BT),
    ) | {"rewards_B": (rows,)}
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
    reserved = {*TERM_ARRAYS} - {"step"}
    repeated = {*reserved, *batch.extra} & {*batch.shared} | {*TERM_ARRAYS} & {*batch.extra}
    require(
        not repeated,
        f"arrays in batch.extra and batch.shared must have names of their own, got "
        f"{sorted(repeated)}; the step has {', '.join(TERM_ARRAYS)}.",
    )
    require(
        a.critic == "none" or state.params.critic is not None,
        f"critic={a.critic} needs a critic's parameters, and the state has none. Try "
        "init_state(Trained(params, init_critic(params, cfg.model, dtype, own_backbone=…)), tx).",
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


def check_old_arrays(a: Algorithm) -> None:
    """Raise ConfigError if a function takes the routing before the first update, and there is one
    update: both would be the same."""
    for fn in (a.objective, *(term.fn for term in a.terms)):
        names = [name for name in array_parameters(fn) if name in OLD_ROUTING]
        require(
            a.updates > 1 or not names,
            f"loss: {function_name(fn)} takes {', '.join(names)}, from before the first update of "
            "a batch, and needs several updates, got loss.epochs=1 and loss.minibatches=1. Try "
            "--set loss.minibatches=2 --set loss.old_logp=recomputed.",
        )


def check_staleness(a: Algorithm, max_staleness: int) -> None:
    """Raise ConfigError if tokens may be `max_staleness` versions old and nothing corrects for it.

    A token is sampled by μ, and rollout_logp is its log μ, also if several versions sampled one
    rollout. π is the policy, π_old the trainer before the updates of the step. Correct for
    μ ≠ π_old are:

    - old_logp="detached" with weights: ρ = π/μ, so E_μ[min(ρ, high)·A·∇log π], the policy gradient
      where ρ < high. There is no clip: only `high` limits how far π moves from μ.
    - old_logp="recomputed" with weights: ρ = π_old/μ corrects for the age, the clipped ratio
      π/π_old for the updates. Source: decoupled PPO, arXiv:2110.00641; AReaL, arXiv:2505.24298.
    - old_logp="rollout": the ratio is π/μ, and its clip limits age and updates together.

    A rejection keeps tokens with μ near π; the bias remains, but is bounded. Without any of these
    the gradient is E_μ[A·∇log π], as if π had sampled the tokens: the ratio is 1 and hides the age.
    """
    names = array_parameters(a.objective)
    uses_rollout_logp = "rollout_logp_BT" in names or (
        a.old_logp == "rollout" and "old_logp_BT" in names
    )
    require(
        max_staleness == 0 or uses_rollout_logp or bool(a.rollout_correction),
        f"rollout.max_staleness={max_staleness} trains on tokens of older weights, and nothing in "
        f"the loss corrects for it: {function_name(a.objective)}, loss.old_logp={a.old_logp}, no "
        'loss.rollout_correction. Try --set "loss.rollout_correction=token_is(high=2.0)".',
    )
