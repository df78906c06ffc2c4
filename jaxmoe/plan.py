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
from jaxmoe.model.params import count_params, param_specs, read_dtype, value_head_specs
from jaxmoe.parallel.sharding import local_shape
from jaxmoe.rl.from_config import algorithm
from jaxmoe.rl.presets import with_preset
from jaxmoe.shapes import Leaf, Params


@dataclass(frozen=True)
class Memory:
    """Bytes on one device in the RL stage."""

    weights: int  # as held and updated, a critic's too
    compute_copy: int  # the policy's weights as they are read: matrices in the model's dtype
    critic_copy: int  # those of a critic's own backbone
    gradients: int  # with microbatches, their float32 sum as well
    optimizer: int  # two moments
    reference: int  # frozen weights of the KL term
    activations: int  # of one microbatch, forward and backward
    cache: int  # keys and values while sampling

    @property
    def training(self) -> int:
        held = self.weights + self.optimizer + self.reference
        copies = self.compute_copy + self.critic_copy
        return held + copies + self.gradients + self.activations

    @property
    def sampling(self) -> int:
        return self.weights + self.optimizer + self.reference + self.compute_copy + self.cache


def memory(cfg: Config) -> Memory:
    """Bytes per device; exact but for activations, which count the arrays that must be live.

    Activations of M = microbatch tokens on one device: with remat the input of each layer pair
    and one pair's working set, else the working set of every layer. A layer's working set is
    its norm outputs, q, k, v, the attention's output and lse, and per active expert one row of
    input, gate, up, hidden and output. A critic's own backbone keeps as much for its backward
    pass as the policy, at the same time.
    """
    m, devices = cfg.model, cfg.mesh.fsdp * cfg.mesh.expert
    policy, own = param_specs(m), cfg.critic.backbone == "own"
    backbone = {name: spec for name, spec in policy.items() if own and name != "head"}
    value_head = {} if cfg.critic.backbone == "none" else value_head_specs(m)
    local = _local_size(policy, cfg)
    local_critic = _local_size(backbone, cfg)
    trained = local + local_critic + _local_size(value_head, cfg)
    held, fast = jnp.dtype(cfg.optim.param_dtype).itemsize, jnp.dtype(m.dtype).itemsize
    packed = cfg.optim.tokens_per_microbatch // cfg.context  # rows
    rows = packed or cfg.rollout.sequences_per_step / cfg.optim.microbatches
    tokens = max(1, math.ceil(rows / devices)) * cfg.context
    summed = packed or cfg.optim.microbatches > cfg.loss.minibatches  # more than one an update
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim
    routed = m.experts_per_token * (2 * m.d_model + 3 * m.d_expert)
    layer = tokens * (fast * (4 * m.d_model + heads + routed) + 4 * (m.n_q_heads + m.n_experts))
    kept = m.n_layers // 2 * tokens * m.d_model * fast if cfg.optim.remat else m.n_layers * layer
    engine_rows = math.ceil(min(cfg.rollout.max_parallel_sequences,
                                cfg.rollout.sequences_per_step) / devices)  # fmt: skip
    return Memory(
        weights=trained * held,
        compute_copy=_copy(policy, cfg),
        critic_copy=_copy(backbone, cfg),
        gradients=trained * (held + 4 if summed else held),
        optimizer=2 * trained * held,
        reference=local * held if cfg.loss.kl_coef > 0 else 0,
        activations=kept * (2 if own else 1) + (2 * layer if cfg.optim.remat else 0),
        cache=cache_bytes(m, engine_rows, cfg.context) if cfg.rollout.engine == "native" else 0,
    )


def describe(cfg: Config) -> str:
    """The resolved config, parameters, bytes per device, and what would run.

    Raises ConfigError where train would refuse the algorithm.
    """
    algorithm(cfg)
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
        f"  RL           {cfg.steps} steps of {r.sequences_per_step} sequences "
        f"({r.prompts_per_step} prompts x {r.samples_per_prompt}), up to {cfg.context:,} tokens"
    )
    lines.append(f"  rollouts     {_engine_line(cfg)}")
    lines += [f"  {name:<13}{text}" for name, text in _algorithm_lines(cfg).items()]
    lines.append(f"  run folder   {cfg.workdir}")
    if devices > 1:
        lines.append(f"  but          train refuses {devices} devices: this version uses one")
    return "\n".join(lines)


def _engine_line(cfg: Config) -> str:
    """Which engine samples, where, and how far ahead of the weights."""
    r, where = cfg.rollout, "native engine"
    if r.engine == "vllm":
        v = r.vllm
        where = f"vLLM, {v.launch} started here" if v.launch else "vLLM, in this process"
        where = f"vLLM at {v.url}" if v.url else where
        where += " (its memory is not in this table)"
    ahead = f", up to {r.max_staleness} steps ahead of the weights" if r.max_staleness else ""
    return where + ahead


def _algorithm_lines(cfg: Config) -> dict[str, str]:
    loss, critic = with_preset(cfg.loss), cfg.critic
    lines = {"objective": f"{loss.objective}, {loss.advantages}, old_logp {loss.old_logp}"}
    if critic.backbone != "none":
        first = f", alone for {critic.pretrain_steps} steps" if critic.pretrain_steps else ""
        lines["critic"] = f"{critic.backbone} backbone, lr {critic.lr:g}{first}"
    if loss.rollout_correction or cfg.loss.preset:
        by = f" (preset {cfg.loss.preset})" if cfg.loss.preset else ""
        lines["correction"] = (loss.rollout_correction or "none") + by
    if loss.updates > 1:
        lines["updates"] = f"{loss.epochs} x {loss.minibatches} a step (epochs x minibatches)"
    return lines


def _local_size(specs: Leaf, cfg: Config) -> int:
    """Entries of these parameters on one device."""
    sizes = {"fsdp": cfg.mesh.fsdp, "expert": cfg.mesh.expert}
    return sum(math.prod(local_shape(s.shape, s.axes, sizes)) for s in jax.tree.leaves(specs))


def _copy(specs: Params, cfg: Config) -> int:
    """Bytes of these parameters on one device, in the dtypes they are read in."""
    return sum(
        _local_size(spec, cfg) * read_dtype(spec, cfg.model, cfg.optim.param_dtype).itemsize
        for spec in jax.tree.leaves(specs)
    )


def _size(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:9.2f} {unit}"
    return f"{value:9d} B"
