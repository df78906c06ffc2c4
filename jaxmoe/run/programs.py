# SPDX-License-Identifier: Apache-2.0
"""The functions that a run jits, with jit's options and the shapes of their arguments.

The caller applies `jax.jit`. Next: jaxmoe/train.py runs them; jaxmoe/plan compiles them for
devices that are not present.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.batches.batch import TURN_ARRAYS, Batch, split_turn_arrays
from jaxmoe.batches.microbatches import Packing, SharedTokens
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.config import Config
from jaxmoe.model import Ops
from jaxmoe.model.rounded import trainer_rounding
from jaxmoe.parallel.rounding import exchange_rows_for_columns, shard_rounding
from jaxmoe.parallel.sharding import batch_sharding, state_mesh, state_shardings
from jaxmoe.records import expert_dtype
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.check_rl_step import check_rl_step
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import TrainState
from jaxmoe.rl.step import supervised_loss_fn, train_step
from jaxmoe.rl.update import rl_step
from jaxmoe.shapes import Leaf


def ignore_arguments(*_: Any) -> None:
    """Check nothing."""


class JitProgram(NamedTuple):
    """A function to jit, jit's options, and the check of its arguments (`CheckedStep`)."""

    fn: Callable[..., Any]
    options: dict[str, Any]
    check: Callable[..., None] = ignore_arguments


def warmup_optimizer(cfg: Config) -> optax.GradientTransformation:
    return make_optimizer(cfg.optim, steps=cfg.warmup.steps, lr=cfg.warmup.lr)


def supervised_program(
    cfg: Config, ops: Ops, mesh: Mesh | None, state: TrainState, teacher: Scorer | None = None
) -> JitProgram:
    """Return the step of the warm start: (state, batch) -> (state, metrics).

    With a `teacher`, the scorer of a second model, its weights are the third argument.
    """
    scorer = Scorer(
        cfg.model,
        ops,
        round_params=shard_rounding(trainer_rounding(cfg), cfg.model, mesh),
        teacher=teacher,
    )
    share = 0.0 if teacher is None else cfg.distill.warmup_share
    step = partial(
        train_step,
        tx=warmup_optimizer(cfg),
        loss_fn=partial(supervised_loss_fn, scorer=scorer, teacher_share=share),
        microbatches=cfg.optim.microbatches,
        prepare=scorer.pack_policy,
    )
    # The state is donated: at full size a device has no room for the old and the new one.
    return JitProgram(step, {"donate_argnums": 0, **out_shardings_option(cfg, mesh, state, 1)})


def rl_program(
    cfg: Config,
    ops: Ops,
    mesh: Mesh | None,
    algorithm: Algorithm,
    tx: optax.GradientTransformation,
    state: TrainState,
    *,
    step: Callable[..., Any] = rl_step,
    make_scorer: Callable[..., Scorer] = Scorer,
    teacher: Scorer | None = None,
) -> JitProgram:
    """Return the step of RL: (state, batch, minibatches, base) -> (state, metrics, token_stats).

    `step` and `make_scorer` take the arguments of `rl_step` and `Scorer`. With a `teacher`, the
    scorer of a second model, its weights are the fifth argument.
    """
    scorer = make_scorer(
        cfg.model,
        ops,
        cfg.rollout.temperature,
        cfg.critic.backbone,
        cfg.lora.scales,
        replay=cfg.router.replay,
        round_params=shard_rounding(trainer_rounding(cfg), cfg.model, mesh),
        place_masters=None
        if mesh is None or mesh.size == 1
        else partial(exchange_rows_for_columns, cfg=cfg.model, mesh=mesh),
    )
    if cfg.distill.teacher == "base":
        teacher = replace(scorer, critic="none", replay="")
    if teacher is not None:
        scorer = replace(scorer, teacher=teacher)
    options = {"algorithm": algorithm, "scorer": scorer, "microbatches": cfg.optim.microbatches}
    fn = partial(step, tx=tx, gate=cfg.step_gate, **options)
    # The base of a LoRA run and a teacher are further arguments, and are not donated: they stay for
    # all steps.
    jit_options = {"donate_argnums": 0, **out_shardings_option(cfg, mesh, state, 2)}
    return JitProgram(fn, jit_options, partial(check_rl_step, **options))


def out_shardings_option(
    cfg: Config, mesh: Mesh | None, state: Leaf, n_unspecified: int
) -> dict[str, Any]:
    """Return jit's option out_shardings for a state and `n_unspecified` further results.

    The state keeps its shardings; XLA chooses those of the other results. {} on one device.
    """
    if (mesh := state_mesh(mesh, cfg.optim)) is None:
        return {}
    # If XLA chose others, the state could not be updated in place, and the next step would be
    # compiled again.
    shardings = state_shardings(state, cfg.model, mesh, cfg.optim.moments)
    return {"out_shardings": (shardings, *(None,) * n_unspecified) if n_unspecified else shardings}


def batch_shapes(
    cfg: Config, a: Algorithm, sharing: PromptSharing | None = None
) -> tuple[Batch, Minibatches | None]:
    """Shapes of the batch and minibatches of an RL step; with `sharing` prompts are shared."""
    B, T, m = cfg.rollout.sequences_per_step, cfg.context, cfg.model
    rows = cfg.optim.tokens_per_microbatch // T

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def packing(*lead: int) -> Packing | None:
        if not rows and sharing is None:
            return None
        per_row, scalar = array(jnp.int32, *lead), array(jnp.int32, *lead[:-1])
        if sharing is None:
            return Packing(per_row, per_row, scalar, rows=rows)
        shared = SharedTokens(
            per_row,
            per_row,
            array(jnp.bool_, *lead),
            per_row,
            per_row,
            per_row,
            scalar,
            scalar,
            offset_BT=(per_token := array(jnp.int32, *lead, T) if sharing.has_contexts else None),
            unshared_segment_BT=per_token,
            unit=sharing.unit,
        )
        return Packing(
            per_row, per_row, scalar, rows=sharing.rows, length=sharing.length, shared=shared
        )

    routed = None
    if cfg.records_experts:
        dtype = expert_dtype(m.n_experts)
        routed = array(dtype, B, T, m.n_layers, m.experts_per_token)
    turns, top_k = array(jnp.int32, B, cfg.rollout.max_turns), cfg.distill.top_k
    takes_turns = not {*TURN_ARRAYS}.isdisjoint(a.array_names.advantages)
    batch = Batch(
        tokens_BT=array(jnp.int32, B, T),
        positions_BT=array(jnp.int32, B, T),
        segment_ids_BT=array(jnp.int32, B, T),
        loss_mask_BT=array(jnp.bool_, B, T),
        rollout_logp_BT=array(jnp.float32, B, T),
        rewards_B=array(jnp.float32, B),
        rewards_BT=array(jnp.float32, B, T),
        samples_per_prompt=cfg.rollout.samples_per_prompt,
        truncated_B=array(jnp.bool_, B),
        turn_ends_BJ=turns if takes_turns else None,
        state_ids_BJ=turns if "state_ids_BJ" in a.array_names.advantages else None,
        routed_experts_BTLA=routed,
        packing=packing(B),
        teacher_logp_BT=array(jnp.float32, B, T) if cfg.distill.is_url else None,
        teacher_top_ids_BTK=array(jnp.int32, B, T, top_k) if top_k else None,
        teacher_top_logp_BTK=array(jnp.float32, B, T, top_k) if top_k else None,
        shared={"step": array(jnp.int32)},
    )
    if a.updates == 1:
        return batch, None
    U, rows_per_minibatch = a.updates, B // a.minibatches
    return batch, Minibatches(
        array(jnp.int32, U, rows_per_minibatch), packing(U, rows_per_minibatch)
    )


def sharded_batch_shapes(
    batch: Batch, minibatches: Minibatches | None, mesh: Mesh | None
) -> tuple[Batch, Minibatches | None]:
    """Return the shapes with the shardings of the arrays that train passes to the step."""
    if mesh is None:
        return batch, minibatches

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    replicated = NamedSharding(mesh, PartitionSpec())
    rows, turns = split_turn_arrays(replace(batch, shared={}))
    rows = jax.tree.map(lambda x: with_sharding(x, batch_sharding(mesh, x.ndim)), rows)
    turns = jax.tree.map(lambda x: with_sharding(x, batch_sharding(mesh, 1)), turns)
    shared, minibatches = jax.tree.map(
        lambda x: with_sharding(x, replicated), (batch.shared, minibatches)
    )
    return replace(rows, shared=shared, **turns), minibatches
