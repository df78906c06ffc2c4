# SPDX-License-Identifier: Apache-2.0
"""A bed whose complete run is one program: answers, scores, updates, without the host.

A step samples with the engine's pure functions, scores with a comparison, and updates with
`rl_step`, so it is the step of studies/bed.py. What differs between runs is an argument (weights,
rate, engine, correction, random numbers), so one program serves all of them.
Next: studies/mismatch_bed.py has the engines.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.batches.batch import Batch
from jaxmoe.config import Config, ModelConfig
from jaxmoe.losses import sequence_is
from jaxmoe.losses.aggregation import effective_sample_size
from jaxmoe.losses.ratios import log_ratios
from jaxmoe.model import Ops, forward, next_token_logits, plain_ops
from jaxmoe.model.rounded import decode_experts, round_experts
from jaxmoe.records import UNKNOWN_EXPERT
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import TrainState, init_rl_state
from jaxmoe.rl.update import rl_step
from jaxmoe.rollout.cache_rows import repeat_rows
from jaxmoe.rollout.decoding import experts_batch_first, prefill_prompts
from jaxmoe.rollout.sampling import sample_tokens
from jaxmoe.shapes import Leaf, Metrics, Params
from studies.bed import make_rate_optimizer
from studies.router_bed import route_disturbed
from studies.transitions import Transitions

MAX_LAG = 16  # steps
FIRST_NOISE, MAX_NOISE = 2.0, 30.0  # deviation of the noise, in units of the mismatch


@struct.dataclass
class StepInputs:
    """Everything random of a step; of a run with a first axis of steps."""

    prompts_PT: Leaf  # int32
    streams_B2: Leaf  # uint32 key data, one random stream an answer
    noise_key_2: Leaf  # uint32 key data of the engine's noise
    rows_UB: Leaf = None  # int32; rows of each update, if there are several


def sample_answers(
    params: Params,
    inputs: StepInputs,
    noise: Float[Array, ""],
    step: Int[Array, ""],
    *,
    cfg: ModelConfig,
    ops: Ops,
    samples: int,
    length: int,
) -> tuple[Array, Array, Array]:
    """Return tokens and log-probs of the answers [B, T], and the experts of all tokens that were
    read [B, T, L, A].

    Normal noise of that deviation is added to the logits of each token. Without it the tokens are
    those of `NativeEngine` with the same streams.
    """
    prompts, prompt_tokens = inputs.prompts_PT.shape
    rows, one = prompts * samples, jnp.ones((), jnp.float32)
    cache, hidden_PD, prompt_experts = prefill_prompts(
        params,
        inputs.prompts_PT,
        jnp.full(prompts, prompt_tokens, jnp.int32),
        step,
        one,
        cfg=cfg,
        ops=ops,
        slots=prompt_tokens + length,
        keep_experts=True,
    )
    streams_B = jax.random.wrap_key_data(inputs.streams_B2)
    noise_key = jax.random.wrap_key_data(inputs.noise_key_2)

    def sample_column(carry: Any, column: Array) -> tuple[Any, Any]:
        cache, hidden_BD = carry
        logits_BV = next_token_logits(params, hidden_BD, cfg, ops, one)
        drawn_BV = jax.random.normal(jax.random.fold_in(noise_key, column), logits_BV.shape)
        keys_B = jax.vmap(jax.random.fold_in)(streams_B, jnp.full(rows, column))
        token_B, logp_B = sample_tokens(logits_BV + noise * drawn_BV, keys_B, greedy=False)
        hidden_BTD, cache, recorded = forward(
            params,
            token_B[:, None],
            cfg,
            ops,
            positions_BT=jnp.full((rows, 1), prompt_tokens + column),
            cache=cache,
            step=step,
            exploration=one,
        )
        experts_BTLA = experts_batch_first(recorded["experts_BTA"], cfg)
        return (cache, hidden_BTD[:, 0]), (token_B, logp_B, experts_BTLA[:, 0])

    start = repeat_rows(cache, samples), jnp.repeat(hidden_PD, samples, axis=0)
    columns = jnp.arange(length, dtype=jnp.int32)
    _, (tokens_TB, logp_TB, experts_TBLA) = lax.scan(sample_column, start, columns)
    experts_BTLA = jnp.moveaxis(experts_TBLA, 0, 1)
    # An engine samples the last token and does not read it.
    experts_BTLA = experts_BTLA.at[:, -1].set(UNKNOWN_EXPERT)
    assert prompt_experts is not None
    prompt_experts = jnp.repeat(prompt_experts, samples, axis=0)
    return tokens_TB.T, logp_TB.T, jnp.concatenate([prompt_experts, experts_BTLA], axis=1)


def make_batch(
    task: Transitions,
    prompts_PT: Array,
    tokens_BT: Array,
    logp_BT: Array,
    experts_BTLA: Array | None,
) -> Batch:
    """Return the batch of answers, which have no end token."""
    samples = len(tokens_BT) // len(prompts_PT)
    prompts_BT = jnp.repeat(prompts_PT, samples, axis=0)
    rows, prompt_tokens = prompts_BT.shape
    length = prompt_tokens + tokens_BT.shape[1]
    is_right_BT = task.find_right_tokens(prompts_BT, tokens_BT)
    rewards_B = jnp.mean(is_right_BT.astype(jnp.float32), axis=1)
    positions_1T = jnp.arange(length, dtype=jnp.int32)[None]
    zeros_BT = jnp.zeros((rows, length), jnp.float32)
    return Batch(
        tokens_BT=jnp.concatenate([prompts_BT, tokens_BT], axis=1),
        positions_BT=jnp.broadcast_to(positions_1T, (rows, length)),
        segment_ids_BT=jnp.ones((rows, length), jnp.int32),
        loss_mask_BT=jnp.broadcast_to(positions_1T >= prompt_tokens, (rows, length)),
        rollout_logp_BT=zeros_BT.at[:, prompt_tokens:].set(logp_BT),
        rewards_B=rewards_B,
        rewards_BT=zeros_BT.at[:, -1].set(rewards_B),
        samples_per_prompt=samples,
        truncated_B=jnp.ones(rows, bool),
        routed_experts_BTLA=experts_BTLA,
    )


@struct.dataclass
class EngineArrays:
    """Ways in which the engine differs; arrays, so that one program serves all of them."""

    mismatch: Leaf = 0.0  # mean |Δlogp| in nats that the noise is regulated to; 0: no noise
    lag: Leaf = 0  # steps between the weights that sample and those that train


@dataclass(frozen=True)
class FusedBed:
    """The static parts of a run.

    engine_dtype: of the engine's arithmetic. has_four_bits: True if its experts are rounded to
    MXFP4. has_router_noise: True if the noise is on the logits of its routers, and not on those of
    the words.
    """

    cfg: Config
    task: Transitions
    algorithm: Algorithm
    ops: Ops
    engine_dtype: str = "float32"
    has_four_bits: bool = False
    has_router_noise: bool = False


def take_fused_step(
    bed: FusedBed,
    state: TrainState,
    sampling_policy: Params,
    inputs: StepInputs,
    *,
    noise: Float[Array, ""],
    correction: Int[Array, ""],
    rate: Float[Array, ""],
) -> tuple[TrainState, Metrics]:
    """Sample, score and update: `take_step` of studies/bed.py, with all of it in the program.

    Metrics are those of the step, the mean `reward`, and `sequence_ess`, the effective sample size
    of products of ratios.
    """
    cfg, step = bed.cfg, state.step // bed.algorithm.updates
    zero, ops = jnp.zeros((), jnp.float32), bed.ops
    if bed.has_router_noise:
        ops = replace(plain_ops(), router=partial(route_disturbed, scale=noise))
    tokens_BT, logp_BT, experts_BTLA = sample_answers(
        sampling_policy,
        inputs,
        zero if bed.has_router_noise else noise,
        step,
        cfg=replace(cfg.model, dtype=bed.engine_dtype),
        ops=ops,
        samples=cfg.rollout.samples_per_prompt,
        length=cfg.rollout.max_new_tokens,
    )
    experts = experts_BTLA if cfg.records_experts else None
    batch = make_batch(bed.task, inputs.prompts_PT, tokens_BT, logp_BT, experts)
    batch = replace(batch, shared={"correction": correction})
    minibatches = None if bed.algorithm.updates == 1 else Minibatches(inputs.rows_UB)
    state, metrics, stats = rl_step(
        state,
        batch,
        minibatches,
        tx=make_rate_optimizer(cfg, rate),
        algorithm=bed.algorithm,
        scorer=Scorer(cfg.model, bed.ops, replay=cfg.router.replay),
    )
    mask_BT = batch.loss_mask_BT
    log_ratio_BT = log_ratios(stats.logp_BT, batch.rollout_logp_BT, mask_BT)
    weights_BT = sequence_is(log_ratio_BT, mask_BT, high=float("inf")).weights_BT
    assert weights_BT is not None
    return state, metrics | {
        "reward": jnp.mean(batch.rewards_B),
        "sequence_ess": effective_sample_size(weights_BT, mask_BT),
    }


ROW_METRICS = (
    "reward",
    "sequence_ess",
    "train_rollout_logprob_abs_diff",
    "rollout_corr/chi2_token",
    "policy/ratio_max",
    "grad/norm",
)


def train_fused(
    bed: FusedBed,
    params: Params,
    inputs: StepInputs,
    engine: EngineArrays,
    correction: Int[Array, ""],
    rate: Float[Array, ""],
) -> tuple[Params, dict[str, Array]]:
    """Make a complete run; return the weights, and ROW_METRICS of its steps.

    After a step the noise is multiplied by the mismatch that is wanted over the one measured, so
    that it stays as large as the policy sharpens.
    """
    n_kept, updates = MAX_LAG + 1, bed.algorithm.updates

    def next_step(carry: Any, inputs: StepInputs) -> tuple[Any, dict[str, Array]]:
        state, kept, noise = carry
        step = state.step // updates
        kept = jax.tree.map(lambda k, x: k.at[step % n_kept].set(x), kept, state.policy)
        version = jnp.maximum(step - engine.lag, 0)
        policy = jax.tree.map(lambda k: k[version % n_kept], kept)
        if bed.has_four_bits:
            policy = decode_experts(round_experts(policy), jnp.float32)
        state, metrics = take_fused_step(
            bed, state, policy, inputs, noise=noise, correction=correction, rate=rate
        )
        measured = metrics["train_rollout_logprob_abs_diff"]
        factor = jnp.clip(engine.mismatch / jnp.maximum(measured, 1e-6), 0.5, 2.0)
        # A policy that is certain of its words has no mismatch, whatever the noise.
        noise = jnp.minimum(noise * factor, MAX_NOISE * engine.mismatch)
        return (state, kept, noise), {name: metrics[name] for name in ROW_METRICS}

    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        state = init_rl_state(params, bed.cfg, make_rate_optimizer(bed.cfg, rate))
        kept = jax.tree.map(lambda x: jnp.repeat(x[None], n_kept, axis=0), params)
        start = state, kept, FIRST_NOISE * jnp.asarray(engine.mismatch, jnp.float32)
        (state, _, _), rows = lax.scan(next_step, start, inputs)
    return state.policy, rows


def evaluate_fused(
    bed: FusedBed, params: Params, inputs: StepInputs, *, samples: int
) -> Float[Array, ""]:
    """Return the mean score of sampled answers, by an engine that does not differ."""
    zero = jnp.zeros((), jnp.float32)
    tokens_BT, _, _ = sample_answers(
        params,
        inputs,
        zero,
        jnp.zeros((), jnp.int32),
        cfg=bed.cfg.model,
        ops=plain_ops(),
        samples=samples,
        length=bed.cfg.rollout.max_new_tokens,
    )
    prompts_BT = jnp.repeat(inputs.prompts_PT, samples, axis=0)
    return jnp.mean(bed.task.find_right_tokens(prompts_BT, tokens_BT).astype(jnp.float32))


def make_inputs(task: Transitions, cfg: Config, steps: int, seed: int) -> StepInputs:
    """Return the prompts and random numbers of a run; the same for all contenders of a seed."""
    rng, rollout = np.random.default_rng((seed, 2)), cfg.rollout
    rows, prompts = rollout.sequences_per_step, rollout.prompts_per_step
    bits = rng.integers(0, 2**32, (steps, rows + 1, 2), dtype=np.uint32)
    prompts_SPT = [
        [prompt.tokens for prompt in task.sample_prompts(rng, prompts)[0]] for _ in range(steps)
    ]
    rows_SB = np.stack([rng.permutation(rows) for _ in range(steps)])
    return StepInputs(
        np.asarray(prompts_SPT, np.int32),
        bits[:, :rows],
        bits[:, rows],
        rows_SB.reshape(steps, cfg.loss.updates, -1).astype(np.int32),
    )
