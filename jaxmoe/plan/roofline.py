# SPDX-License-Identifier: Apache-2.0
"""How long a step must take at least: by arithmetic, by memory, and by what travels.

Each bound is of hardware that is never idle; the largest is what no run is faster than.
Next: jaxmoe/plan/report.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmoe.config import Config
from jaxmoe.memory import copy_bytes, layer_bytes, layer_flops, microbatch_rows, plan_memory
from jaxmoe.model.cache import cache_bytes
from jaxmoe.model.params import param_specs
from jaxmoe.parallel.sharding import sampling_rules
from jaxmoe.plan.chips import Chip
from jaxmoe.plan.collectives import Collective, sent
from jaxmoe.plan.compiled import microbatches
from jaxmoe.plan.schedules import Kernels
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.update import is_gated


@dataclass(frozen=True)
class StepWork:
    """What one device does, in a step whose sequences all have full length."""

    flops: float  # of matrix products, those done again included
    useful: float  # one forward and its gradient alone, 3 times a forward
    traffic: float  # bytes between the chip and its memory


@dataclass(frozen=True)
class Bounds:
    """Seconds of a step, by what limits it."""

    arithmetic: float
    memory: float
    links: float
    network: float

    @property
    def step(self) -> float:
        return max(vars(self).values())

    @property
    def limit(self) -> str:
        return max(vars(self), key=lambda name: vars(self)[name])


def work(cfg: Config, a: Algorithm) -> StepWork:
    """By the config alone.

    flops = sequences·(scored·f + epochs·(f + 2·linear + 2.5·attention + 3·head + again))/devices
    with f = linear + attention + head a forward, head = 2·T·D·V, made again in the backward pass.
    traffic, at least: a layer's weights once a pass and microbatch, again once where they are
    gathered, the gradients' sum in float32, seven arrays of the optimizer, and each layer's
    arrays written and read once a pass.
    """
    m, mesh, B = cfg.model, cfg.mesh, cfg.rollout.sequences_per_step
    flops, head = layer_flops(cfg), 2 * cfg.context * m.d_model * m.padded_vocab
    own = a.critic == "own"
    layers = flops.linear + flops.attention
    forward = layers + head
    scored = forward * (scores_policy(cfg, a) + (a.kl_coef > 0)) + layers * own
    trained = forward + 2 * flops.linear + 2.5 * flops.attention + 3 * head
    trained += flops.recomputed_flops(cfg)
    if own:
        trained += 3 * flops.linear + 3.5 * flops.attention + flops.recomputed_flops(cfg)
    useful = 3 * forward * a.epochs + 3 * layers * own * a.epochs
    share = B / mesh.devices
    passes = 3 + cfg.optim.remat + (scores_policy(cfg, a) + (a.kl_coef > 0)) / a.epochs
    pieces = microbatches(cfg) * a.updates
    head_bytes = m.d_model * m.padded_vocab * jnp.dtype(m.dtype).itemsize
    weights = layer_bytes(cfg) * m.n_layers + head_bytes
    mem, rows = plan_memory(cfg), microbatch_rows(cfg)
    arrays = layer_arrays(cfg, rows * cfg.context // mesh.sequence)
    held = mem.weights / jnp.dtype(cfg.optim.param_dtype).itemsize
    traffic = pieces * (passes * (weights * (1 + (mesh.devices > 1)) + arrays) + 8 * held)
    return StepWork(
        flops=share * (scored + a.epochs * trained), useful=share * useful,
        traffic=traffic + 7 * mem.weights * a.updates,
    )  # fmt: skip


def layer_arrays(cfg: Config, tokens: int) -> int:
    """Bytes that one pass over all layers writes and reads again, of a device's tokens."""
    m = cfg.model
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim // cfg.mesh.tensor
    layer = 4 * m.d_model + heads + m.experts_per_token * (2 * m.d_model + 3 * m.d_expert)
    return 2 * tokens * layer * m.n_layers * jnp.dtype(m.dtype).itemsize


def wave_work(cfg: Config, prompts: int) -> tuple[StepWork, StepWork]:
    """Of one device: the prefill of so many longest prompts, and one token of all their answers.

    A token is the mean one of answers of full length. traffic, at least: prefill reads the weights
    once, and writes and reads each layer's arrays; a token reads the keys and values that are
    there and the weights, of experts those that somebody asks for where all are asked alike.
    """
    m, mesh, r = cfg.model, cfg.mesh, cfg.rollout
    P, N, rows = cfg.data.max_prompt_tokens, r.max_new_tokens, prompts * r.samples_per_prompt
    first, whole = (sum(vars(layer_flops(cfg, T)).values()) for T in (P, P + N))
    before = first * prompts / mesh.devices
    token = ((whole - first) / N + 2 * m.d_model * m.padded_vocab) * rows / mesh.devices
    policy = {name: spec for name, spec in param_specs(m).items() if name != "embed"}
    rules = sampling_rules(m).rules
    weights = copy_bytes(policy, cfg, rules)
    routed = copy_bytes(
        [spec for spec in jax.tree.leaves(policy) if "expert" in spec.axes], cfg, rules
    )
    asked = 1 - (1 - m.experts_per_token / m.n_experts) ** (rows / mesh.data)
    mine = mesh.devices / mesh.tensor  # devices with rows of their own
    keys = cache_bytes(m, 1, P + N // 2) * rows / mesh.devices
    return (
        StepWork(before, before, float(weights + layer_arrays(cfg, round(prompts * P / mine)))),
        StepWork(token, token, weights - (1 - asked) * routed + keys),
    )


def scores_policy(cfg: Config, a: Algorithm) -> bool:
    """Whether a step has a forward of the policy before its first gradient."""
    return a.needs_scoring or (is_gated(cfg.gate) and a.updates > 1) or a.critic == "shared"


def bounds(
    done: StepWork, travels: Mapping[Collective, int], chip: Chip, host_of: Sequence[int],
    kernels: Kernels | None = None,
) -> Bounds:  # fmt: skip
    """Seconds, of this chip; `kernels` by their schedules, all else at the peak."""
    peak = done.flops - (kernels.flops if kernels else 0.0)
    outside = float(sum(x.to_other_hosts(host_of) * times for x, times in travels.items()))
    return Bounds(
        arithmetic=peak / chip.flops + (kernels.seconds if kernels else 0.0),
        memory=done.traffic / chip.memory_bandwidth,
        links=sent(travels) / chip.links,
        network=outside / chip.network if chip.network else 0.0,
    )
