# SPDX-License-Identifier: Apache-2.0
"""One step with shared prompts against the same step without them, in float64 or float32.

python tests/jaxmoe/shared_exactness.py CASE float64|float32

Prints one line of JSON: the largest difference of any gradient array, relative to its largest
entry; of the loss; of trained log-probs; of any metric. In float32 it is also that of packed rows.
The optimizer stores the gradient. Four-bit weights have the codes that they have in float32, and
are multiplied in float64. Next: tests/jaxmoe/batches/test_shared_prompts_exact.py.
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax import lax

F64 = __name__ == "__main__" and sys.argv[2] == "float64"
if F64:
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64  # before jaxmoe is imported: all that it writes as float32
    bitcast = lax.bitcast_convert_type

    def bitcast_float32(x, dtype):
        """Bits of four-bit values and scales are those of float32."""
        if x.dtype == jnp.int32 and dtype == jnp.float64:
            return bitcast(x, jnp.dtype("float32")).astype(dtype)
        if x.dtype == jnp.float64 and dtype == jnp.int32:
            return bitcast(x.astype("float32"), dtype)
        return bitcast(x, dtype)

    lax.bitcast_convert_type = bitcast_float32

from dataclasses import replace  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import numpy as np  # noqa: E402
import optax  # noqa: E402

from jaxmoe.batches.batch import Batch  # noqa: E402
from jaxmoe.batches.shared_prompts import PromptSharing  # noqa: E402
from jaxmoe.config import LoraConfig, ModelConfig  # noqa: E402
from jaxmoe.losses import (  # noqa: E402
    cispo,
    gae,
    geometric_is,
    gspo,
    kept_token_mean,
    kl_k1,
    load_balance,
    ppo_clip,
    reinforce,
    reinforce_pp_advantages,
    rloo_advantages,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    sequence_is,
    token_is,
    z_loss,
)
from jaxmoe.model import init_critic, init_params, plain_ops  # noqa: E402
from jaxmoe.model.lora import init_adapters  # noqa: E402
from jaxmoe.model.moe.router import record_router_logits, replay_routing  # noqa: E402
from jaxmoe.model.moe.routers_from_config import record_all  # noqa: E402
from jaxmoe.model.rounded import map_experts, round_experts  # noqa: E402
from jaxmoe.rl.algorithm import Algorithm  # noqa: E402
from jaxmoe.rl.minibatches import sharing_metrics, split_minibatches  # noqa: E402
from jaxmoe.rl.scorer import Scorer  # noqa: E402
from jaxmoe.rl.state import Frozen, Trained, init_state  # noqa: E402
from jaxmoe.rl.terms import Term, entropy_term, kl_term, value_term  # noqa: E402
from jaxmoe.rl.update import jit_step  # noqa: E402
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4  # noqa: E402
from pallas_kernels.grouped_matmul.mxfp4_stochastic import round_stochastically  # noqa: E402

FLOAT = "float64" if F64 else "float32"
STORE_GRADIENT = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
)


class Case(NamedTuple):
    """An algorithm, and what is particular of its batch and model."""

    algorithm: dict[str, Any]
    window: int = 5
    length: int = 160  # of a shared row
    rows: int = 1
    fixed: bool = False  # all prompts and answers have full length
    replay: str = ""
    records: bool = False  # router logits, for terms of them
    lora: bool = False
    four_bits: str = ""  # experts: the "base" of adapters, or those of unrounded "masters"
    tokens_per_microbatch: int = 0
    contexts: bool = False  # rows have a second context, which may begin as the prompt


GROUPS, SAMPLES, PROMPT, ANSWER = 4, 3, 23, 14
FULL_GROUP = PROMPT - 1 + SAMPLES * (ANSWER + 1)
VALUES = dict(advantages=partial(gae, trace=0.9), terms=(value_term(),))
CASES = {
    "grpo, entropy, windows longer than prompts": Case(
        dict(terms=(entropy_term(0.08),)), window=40
    ),
    "grpo, completely full rows": Case({}, length=FULL_GROUP, rows=2, fixed=True),
    "grpo, split groups": Case(dict(terms=(entropy_term(0.08),)), length=PROMPT + 2 * ANSWER),
    "gspo, kl in the loss": Case(
        dict(
            objective=partial(gspo, clip_low=0.1, clip_high=0.2),
            aggregation=seq_mean_token_mean,
            old_logp="recomputed",
            rollout_correction=(partial(sequence_is, high=2.0),),
            terms=(kl_term(0.1),),
        )
    ),
    "reinforce++, kl in the reward": Case(
        dict(
            objective=reinforce,
            advantages=reinforce_pp_advantages,
            reward_kl=kl_term(0.1, kl_k1),
            old_logp="recomputed",
            aggregation=kept_token_mean,
            rollout_correction=(token_is,),
        )
    ),
    "dr_grpo": Case(
        dict(advantages=rloo_advantages, aggregation=partial(seq_mean_token_sum_norm, length=9))
    ),
    "ppo anchored at the rollout": Case(
        dict(objective=partial(ppo_clip, dual_clip=1.5), old_logp="rollout")
    ),
    "cispo": Case(dict(objective=cispo, aggregation=seq_mean_token_mean)),
    "ppo, shared critic": Case(
        VALUES | dict(critic="shared", rollout_correction=(geometric_is,)), rows=2
    ),
    "ppo, own critic": Case(VALUES | dict(critic="own")),
    "minibatches and epochs, r2": Case(
        dict(old_logp="recomputed", epochs=2, minibatches=2), replay="R2", length=120
    ),
    "minibatches, packed, own critic": Case(
        VALUES | dict(critic="own", old_logp="recomputed", minibatches=2),
        length=80,
        tokens_per_microbatch=2 * (PROMPT + ANSWER),
    ),
    "r3": Case(dict(old_logp="recomputed"), replay="R3"),
    "router terms": Case(
        dict(terms=(Term(load_balance, 0.1, "balance"), Term(z_loss, 0.1, "z"))),
        replay="R3",
        records=True,
    ),
    "several contexts, own critic": Case(VALUES | dict(critic="own"), contexts=True, window=30),
    "several contexts, gspo, r3, minibatches": Case(
        dict(
            objective=partial(gspo, clip_low=0.1, clip_high=0.2),
            aggregation=seq_mean_token_mean,
            old_logp="recomputed",
            rollout_correction=(partial(sequence_is, high=2.0),),
            minibatches=2,
        ),
        contexts=True,
        replay="R3",
    ),
    "lora": Case(dict(terms=(kl_term(0.1),)), lora=True),
    "lora of a four-bit base": Case(dict(terms=(kl_term(0.1),)), lora=True, four_bits="base"),
    "four-bit experts of masters, epochs": Case(
        dict(terms=(kl_term(0.1),), old_logp="recomputed", epochs=2), four_bits="masters"
    ),
}


def make_config(case: Case) -> ModelConfig:
    cfg = ModelConfig(
        vocab_size=61,
        d_model=64 if case.four_bits else 32,
        n_layers=2,
        n_q_heads=4,
        n_kv_heads=2,
        head_dim=8,
        n_experts=5,
        experts_per_token=2,
        d_expert=128 if case.four_bits else 24,
        sliding_window=case.window,
        dtype="float32",
    )
    object.__setattr__(cfg, "dtype", FLOAT)  # float64 is not for users
    return cfg


def make_batch(case: Case, cfg: ModelConfig, seed: int = 0) -> Batch:
    """Groups of one prompt; environment tokens inside answers, and a row that trains nothing."""
    rng, B, T = np.random.default_rng(seed), GROUPS * SAMPLES, PROMPT + ANSWER
    tokens, segments = np.zeros((2, B, T), np.int32)
    mask, truncated = np.zeros((B, T), bool), rng.random(B) < 0.3
    experts = rng.random((B, T, cfg.n_layers, cfg.n_experts)).argsort(-1)
    experts = experts[..., : cfg.experts_per_token].astype(np.int8)
    for group in range(GROUPS):
        p = PROMPT if case.fixed else int(rng.integers(1, PROMPT + 1))
        prompt, first = rng.integers(0, cfg.vocab_size, p), group * SAMPLES
        for i in range(first, first + SAMPLES):
            n = ANSWER if case.fixed else int(rng.integers(1, ANSWER + 1))
            tokens[i, :p], tokens[i, p : p + n] = prompt, rng.integers(0, cfg.vocab_size, n)
            segments[i, : p + n] = 1
            mask[i, p : p + n] = True
            mask[i, p + 3 : p + 5] = False  # the environment's
            experts[i, :p] = experts[first, :p]
    mask[1] = False
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    if case.contexts:
        arrays = (tokens, segments, mask, positions, experts)
        tokens, segments, mask, positions, experts = add_contexts(*arrays, cfg)
    shape = tokens.shape
    return Batch(
        tokens_BT=tokens,
        positions_BT=positions,
        segment_ids_BT=segments,
        loss_mask_BT=mask,
        rollout_logp_BT=np.where(mask, rng.uniform(-6, -3, shape), 0).astype(FLOAT),
        rewards_B=rng.normal(size=B).astype(FLOAT),
        samples_per_prompt=SAMPLES,
        truncated_B=truncated,
        routed_experts_BTLA=experts if case.replay == "R3" else None,
    )


def add_contexts(tokens, segments, mask, positions, experts, cfg):
    """Add a second context to each row: its prompt and more, or others, or two thirds of its
    prompt, where the policy then writes the next two tokens of the prompt."""
    rng, (B, T) = np.random.default_rng(7), tokens.shape
    arrays = [
        np.pad(x, [(0, 0), (0, PROMPT + 9), *[(0, 0)] * (x.ndim - 2)])
        for x in (tokens, segments, mask, positions, experts)
    ]
    tokens, segments, mask, positions, experts = arrays
    experts[:, T:] = rng.random((B, PROMPT + 9, *experts.shape[2:3], cfg.n_experts)).argsort(-1)[
        ..., : cfg.experts_per_token
    ]
    for i in range(B):
        end, p = int((segments[i] > 0).sum()), int(mask[i].argmax()) if mask[i].any() else 2
        is_short = i % 3 == 1 and p > 4
        start, n = end + (p - p // 3 if is_short else p + 3), int(rng.integers(3, 7))
        tokens[i, end : start + n] = rng.integers(0, cfg.vocab_size, start - end + n)
        same = min(p, start - end + 2)
        if i % 3 != 2:
            tokens[i, end : end + same] = tokens[i, :same]
            experts[i, end : end + same] = experts[i, :same]
        segments[i, end : start + n] = 2
        positions[i, end:] = np.arange(tokens.shape[1] - end)
        mask[i, start : start + n] = i != 1
    return arrays


def init_weights(cfg: ModelConfig) -> Any:
    """Weights with sinks, biases and scales that are not those of a start."""
    rng = np.random.default_rng(1)

    def disturb(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        size = 1.0 if "sinks" in name else 0.1 if x.ndim <= 2 else 0.02
        return x + jnp.asarray(size * rng.normal(size=x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(disturb, init_params(jax.random.key(0), cfg, FLOAT))


def run_step(case: Case, cfg: ModelConfig, batch: Any, minibatches: Any) -> tuple[Any, ...]:
    """Return gradient, metrics and log-probs of a step."""
    a, weights = Algorithm(**case.algorithm), init_weights(cfg)
    ops = replace(plain_ops(), router=replay_routing) if case.replay else plain_ops()
    record = partial(record_all, (record_router_logits,))
    ops = replace(ops, record=record) if case.records else ops
    critic, base, policy, scales = None, None, weights, {}
    if a.critic != "none":
        critic = init_critic(weights, cfg, FLOAT, own_backbone=a.critic == "own")
        critic["value_head"]["w_value"] = jnp.sin(jnp.arange(cfg.d_model, dtype=FLOAT))
    if case.four_bits == "base":
        weights = round_experts(weights)
    round_params = None
    if case.four_bits == "masters":
        stochastic = partial(encode_mxfp4, round_magnitude=round_stochastically)
        round_params = partial(map_experts, stochastic)
    if case.lora:
        lora = LoraConfig(attention_rank=3, expert_rank=2)
        base, scales = weights, lora.scales
        policy = init_adapters(jax.random.key(2), cfg, lora, base)
        policy = jax.tree.map(
            lambda x: x + 0.05 * jnp.sin(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)), policy
        )
    needs_copy = a.needs_reference and not case.lora
    reference = jax.tree.map(lambda x: 1.05 * x, policy) if needs_copy else None
    state = init_state(Trained(policy, critic), STORE_GRADIENT, Frozen(reference=reference))
    scorer = Scorer(
        cfg, ops, critic=a.critic, scales=scales, replay=case.replay, round_params=round_params
    )
    step = jit_step(tx=STORE_GRADIENT, algorithm=a, scorer=scorer)
    after, metrics, stats = step(state, batch, minibatches, base)
    return after.opt_state, metrics, stats.logp_BT * np.asarray(batch.loss_mask_BT)


def largest_difference(actual: Any, expected: Any) -> float:
    """The largest difference of any array, relative to the largest entry of it."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y)), initial=0.0))
        / max(float(np.max(np.abs(np.asarray(y)), initial=0.0)), 1e-30)
        for x, y in pairs
    )


def compare(case: Case, *, packed: bool) -> dict[str, dict[str, float]]:
    """Differences of shared rows, and if asked of packed rows, from those of today."""
    cfg, a = make_config(case), Algorithm(**case.algorithm)
    batch = make_batch(case, cfg)
    split = partial(split_minibatches, batch, a, seed=(1,))
    want_grads, want, want_logp = run_step(case, cfg, *split())
    tokens = case.tokens_per_microbatch
    sharing = PromptSharing(case.length, case.rows, has_contexts=case.contexts)
    shared = split(tokens_per_microbatch=tokens, sharing=sharing)
    assert sharing_metrics(*shared)["batch/computed_tokens_frac"] < 1.0
    assert not np.asarray(shared[0].packing.shared.is_stored_B).all()
    layouts = {"shared": shared}
    if packed:
        layouts["packed"] = split(tokens_per_microbatch=2 * batch.tokens_BT.shape[1])
    gaps = {}
    for layout, arrays_of_layout in layouts.items():
        grads, metrics, logp = run_step(case, cfg, *arrays_of_layout)
        assert metrics.keys() == want.keys()
        gaps[layout] = {
            "gradient": largest_difference(grads, want_grads),
            "loss": largest_difference(metrics["loss"], want["loss"]),
            "logp": largest_difference(logp, want_logp),
            # A metric that is 0 but for rounding is compared with 1.
            "metrics": max(
                float(np.max(np.abs(np.asarray(metrics[name]) - np.asarray(x))))
                / max(1.0, float(np.max(np.abs(np.asarray(x)))))
                for name, x in want.items()
            ),
        }
    return gaps


if __name__ == "__main__":
    print(json.dumps(compare(CASES[sys.argv[1]], packed=not F64)))
