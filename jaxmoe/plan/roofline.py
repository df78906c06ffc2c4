# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a step's time: by arithmetic, by memory, and by communication.

Each bound assumes that its hardware is never idle; no run is faster than the largest bound.
Next: jaxmoe/plan/report.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxmoe.batches.computed_tokens import ComputedTokens, count_full_lengths
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.checkpoint.teacher_weights import find_teacher
from jaxmoe.config import Config, RouterConfig
from jaxmoe.config_file import override
from jaxmoe.model.params import param_specs
from jaxmoe.model.weights import weights_of
from jaxmoe.parallel.param_bytes import engine_bytes
from jaxmoe.parallel.sharding import sampling_rules
from jaxmoe.plan.chips import Chip
from jaxmoe.plan.collectives import Collective, sent_bytes
from jaxmoe.plan.compiled import microbatch_tokens
from jaxmoe.plan.schedules import KernelTime
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.muon import muon_flops
from jaxmoe.rollout.native_memory import rows_cache_bytes
from jaxmoe.run.memory import (
    LayerFlops,
    layer_bytes,
    layer_flops,
    plan_memory,
)


@dataclass(frozen=True)
class StepWork:
    """Work of one device in a step whose sequences all have full length."""

    flops: float  # of matrix products, recomputation included
    useful: float  # of one forward and its gradient: 3 times a forward, less with LoRA
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


def step_work(cfg: Config, a: Algorithm, sharing: PromptSharing | None = None) -> StepWork:
    """Work of a step by the config alone; `sharing` is that of `shared_at_full_lengths`.

    flops = (scored·f + epochs·(f + g·linear + 2.5·attention + (1 + g)·head + recomputed)
    + updates·muon) / devices
    over all sequences, with f = linear + attention + head a forward and head = 2·D·V a token, which
    the backward pass recomputes. g is 2, and 1 with LoRA, whose frozen matrices have no gradient of
    their own; the products of adapters are not counted. Of shared rows padding counts, which the
    linear layers compute as other tokens.
    traffic is a lower bound: a layer's weights once per pass and microbatch, once more where they
    are gathered, the gradients' sum in float32, weights, gradient and the optimizer's state in an
    update, and each layer's arrays written and read once per pass.
    """
    m, mesh, full = cfg.model, cfg.mesh, count_full_lengths(cfg, sharing)
    flops, head = pass_flops(cfg, full.batch)
    has_critic = a.critic == "own"
    layers = flops.linear + flops.attention
    scored = (layers + head) * (scores_policy(cfg, a) + a.needs_reference) + layers * has_critic
    flops, head = pass_flops(cfg, full.updates)
    layers = flops.linear + flops.attention
    products = 1 if cfg.lora.ranks else 2  # of a matrix in the backward pass
    trained = (
        layers + head + products * flops.linear + 2.5 * flops.attention + (1 + products) * head
    )
    trained += flops.recomputed_flops(cfg)
    if has_critic:
        trained += 3 * flops.linear + 3.5 * flops.attention + flops.recomputed_flops(cfg)
    useful = (1 + products) * (flops.linear + head) + 3 * flops.attention
    useful = a.epochs * (useful + 3 * layers * has_critic)
    passes = 3 + cfg.optim.remat + (scores_policy(cfg, a) + a.needs_reference) / a.epochs
    n_microbatches = full.updates.microbatches * a.updates
    head_bytes = m.d_model * m.padded_vocab * jnp.dtype(m.dtype).itemsize
    weights = layer_bytes(cfg) * m.n_layers + head_bytes
    mem = plan_memory(cfg)
    arrays = layer_traffic(cfg, microbatch_tokens(cfg, sharing))
    update = a.updates * muon_flops(weights_of(cfg).trained) if cfg.optim.is_muon else 0
    state = plan_memory(override(cfg, "optim.moments=device")).optimizer
    n_params = mem.weights / jnp.dtype(cfg.optim.param_dtype).itemsize
    # The sum of the gradients is read and written in float32, 8 bytes a parameter.
    traffic = n_microbatches * (
        passes * (weights * (1 + (mesh.devices > 1)) + arrays) + 8 * n_params
    )
    taught, teacher_passes = teacher_work(cfg, a, full.batch)
    traffic += n_microbatches * teacher_passes * mem.teacher
    return StepWork(
        flops=(scored + a.epochs * trained + update + taught) / mesh.devices,
        useful=useful / mesh.devices,
        # An update reads and writes the weights and the state, and reads the gradient.
        traffic=traffic + (3 * mem.weights + 2 * state) * a.updates,
    )


def teacher_work(cfg: Config, a: Algorithm, computed: ComputedTokens) -> tuple[float, int]:
    """FLOPs of a teacher's forwards in a step, and their number: one that scores the batch, and one
    in each epoch for divergences over the vocabulary, without the gradient of the policy's logits.
    """
    passes = a.needs_teacher_logp + a.epochs * a.needs_divergences
    if not cfg.distill.teacher or cfg.distill.is_url:
        return 0.0, 0
    if cfg.distill.has_folder:
        cfg = replace(cfg, model=find_teacher(cfg).model, router=RouterConfig())
    flops, head = pass_flops(cfg, computed)
    return passes * (flops.linear + flops.attention + head), passes


def pass_flops(cfg: Config, computed: ComputedTokens) -> tuple[LayerFlops, int]:
    """FLOPs of a forward of all sequences: those of the layers, and those of the head."""
    m, B = cfg.model, cfg.rollout.sequences_per_step
    flops, head = layer_flops(cfg), 2 * cfg.context * m.d_model * m.padded_vocab
    if not computed.prompts:
        return LayerFlops(B * flops.linear, B * flops.attention), B * head
    # Of attention only visible pairs count, so a shared prompt has those of its own queries once.
    prompt = layer_flops(cfg, computed.shared).attention
    attention = computed.prompts * prompt + B * (flops.attention - prompt)
    linear = flops.linear // cfg.context * computed.tokens
    return LayerFlops(linear, attention), head // cfg.context * computed.tokens


def layer_traffic(cfg: Config, tokens: int) -> int:
    """Bytes that one pass over all layers writes and reads for a device's tokens."""
    m = cfg.model
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim // cfg.mesh.tensor
    layer = 4 * m.d_model + heads + m.experts_per_token * (2 * m.d_model + 3 * m.d_expert)
    return 2 * tokens * layer * m.n_layers * jnp.dtype(m.dtype).itemsize


def sampling_work(cfg: Config, prompts: int) -> tuple[StepWork, StepWork]:
    """Work of one device: prefill of `prompts` longest prompts, and one token of their answers.

    The token is the mean one of answers of full length. traffic is a lower bound: prefill reads the
    weights once, and writes and reads each layer's arrays; a token reads the cached keys and values
    and the weights, of the experts only those active under balanced routing.
    """
    m, mesh, r = cfg.model, cfg.mesh, cfg.rollout
    P, N, rows = cfg.data.max_prompt_tokens, r.max_new_tokens, prompts * r.samples_per_prompt
    first, complete = (sum(vars(layer_flops(cfg, T)).values()) for T in (P, P + N))
    prefill_flops = first * prompts / mesh.devices
    token = ((complete - first) / N + 2 * m.d_model * m.padded_vocab) * rows / mesh.devices
    policy = {name: spec for name, spec in param_specs(m).items() if name != "embed"}
    rules = sampling_rules(m).rules
    weights = engine_bytes(policy, cfg, rules)
    routed = engine_bytes(
        [spec for spec in jax.tree.leaves(policy) if "expert" in spec.axes], cfg, rules
    )
    # The probability that at least one row chooses an expert, for independent and balanced choices.
    active_share = 1 - (1 - m.experts_per_token / m.n_experts) ** (rows / mesh.data)
    row_devices = mesh.devices / mesh.tensor  # devices with rows of their own
    # The mean token of an answer reads half of the answer's keys.
    keys = rows_cache_bytes(cfg, prompts, N // 2) / mesh.devices
    return (
        StepWork(
            prefill_flops,
            prefill_flops,
            float(weights + layer_traffic(cfg, round(prompts * P / row_devices))),
        ),
        StepWork(token, token, weights - (1 - active_share) * routed + keys),
    )


def scores_policy(cfg: Config, a: Algorithm) -> bool:
    """Return True if a step has a forward of the policy before its first gradient."""
    gate_needs_it = cfg.gate.has_limits and a.updates > 1
    return a.needs_scoring or gate_needs_it or a.critic == "shared" or cfg.router.replay == "R2"


def step_bounds(
    work: StepWork,
    travels: Mapping[Collective, int],
    chip: Chip,
    host_of: Sequence[int],
    kernels: KernelTime | None = None,
) -> Bounds:
    """Lower bounds in seconds on this chip; `kernels` by their schedules, all else at the peak."""
    peak = work.flops - (kernels.flops if kernels else 0.0)
    outside = float(sum(x.to_other_hosts(host_of) * times for x, times in travels.items()))
    return Bounds(
        arithmetic=peak / chip.flops + (kernels.seconds if kernels else 0.0),
        memory=work.traffic / chip.memory_bandwidth,
        links=sent_bytes(travels) / chip.links,
        network=outside / chip.network if chip.network else 0.0,
    )
