# SPDX-License-Identifier: Apache-2.0
"""What a run would need and do, computed from shapes alone: `train --dry-run`.

No weight is read or made, whatever the size. Next: jaxmoe/train.py runs it.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmoe.config import Config, to_json
from jaxmoe.model.cache import cache_bytes
from jaxmoe.model.params import count_params, map_specs
from jaxmoe.parallel.sharding import local_shape


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: int  # as held and updated
    compute_copy: int  # the same weights in the model's dtype, where that differs
    gradients: int  # with microbatches, their float32 sum as well
    optimizer: int  # two moments
    reference: int  # frozen weights of the KL term
    activations: int  # of one microbatch, forward and backward
    cache: int  # keys and values while sampling

    @property
    def training(self) -> int:
        held = self.weights + self.optimizer + self.reference
        return held + self.compute_copy + self.gradients + self.activations

    @property
    def sampling(self) -> int:
        return self.weights + self.optimizer + self.reference + self.compute_copy + self.cache


def memory(cfg: Config) -> Memory:
    """Bytes per device; exact but for activations, which count the arrays that must be live.

    Activations of M = microbatch tokens on one device: with remat the input of each layer pair
    and one pair's working set, else the working set of every layer. A layer's working set is
    its norm outputs, q, k, v, the attention's output and lse, and per active expert one row of
    input, gate, up, hidden and output.
    """
    m, sizes = cfg.model, {"fsdp": cfg.mesh.fsdp, "expert": cfg.mesh.expert}
    pieces = map_specs(lambda s: math.prod(local_shape(s.shape, s.axes, sizes)), m)
    local = sum(jax.tree.leaves(pieces))
    held, fast = jnp.dtype(cfg.optim.param_dtype).itemsize, jnp.dtype(m.dtype).itemsize
    devices = cfg.mesh.fsdp * cfg.mesh.expert
    rows = max(1, math.ceil(cfg.rollout.sequences_per_step / cfg.optim.microbatches / devices))
    tokens = rows * cfg.context
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim
    routed = m.experts_per_token * (2 * m.d_model + 3 * m.d_expert)
    layer = tokens * (fast * (4 * m.d_model + heads + routed) + 4 * (m.n_q_heads + m.n_experts))
    if cfg.optim.remat:
        activations = m.n_layers // 2 * tokens * m.d_model * fast + 2 * layer
    else:
        activations = m.n_layers * layer
    engine_rows = math.ceil(min(cfg.rollout.max_parallel_sequences,
                                cfg.rollout.sequences_per_step) / devices)  # fmt: skip
    return Memory(
        weights=local * held,
        compute_copy=local * fast,
        gradients=local * (held + 4 if cfg.optim.microbatches > 1 else held),
        optimizer=2 * local * held,
        reference=local * held if cfg.loss.kl_coef > 0 else 0,
        activations=activations,
        cache=cache_bytes(m, engine_rows, cfg.context),
    )


def describe(cfg: Config) -> str:
    """The resolved config, parameters, bytes per device, and what would run."""
    total, active = count_params(cfg.model)
    mem, r = memory(cfg), cfg.rollout
    devices = cfg.mesh.fsdp * cfg.mesh.expert
    lines = [
        to_json(cfg),
        "",
        f"parameters   {total:,} ({active:,} act on a token)",
        f"devices      {devices} (fsdp {cfg.mesh.fsdp} x expert {cfg.mesh.expert}); bytes on each:",
        *(f"  {name:<13}{_size(value)}" for name, value in vars(mem).items()),
        f"  {'training':<13}{_size(mem.training)}   (all but the cache)",
        f"  {'sampling':<13}{_size(mem.sampling)}   (weights, moments, copy, cache)",
        "",
        "would run",
        f"  weights      {cfg.init.checkpoint or 'random, seed ' + str(cfg.seed)}",
        f"  task         {cfg.data.task}",
    ]
    if cfg.warmup.steps:
        w = cfg.warmup
        lines.append(f"  warm start   {w.steps} supervised steps of {w.sequences_per_step} answers")
    lines.append(
        f"  GRPO         {cfg.steps} steps of {r.sequences_per_step} sequences "
        f"({r.prompts_per_step} prompts x {r.samples_per_prompt}), up to {cfg.context:,} tokens"
    )
    lines.append(f"  run folder   {cfg.workdir}")
    if devices > 1:
        lines.append(f"  but          train refuses {devices} devices: this version uses one")
    return "\n".join(lines)


def _size(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:9.2f} {unit}"
    return f"{value:9d} B"
