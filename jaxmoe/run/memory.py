# SPDX-License-Identifier: Apache-2.0
"""Memory and FLOPs of a run, computed from shapes; a run that does not fit is refused.

No weight is read or made. Next: jaxmoe/run/dry_run.py prints the result.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmoe.config import Config, ConfigError, describe_engine
from jaxmoe.config_file import override
from jaxmoe.distributed.host import count_free_bytes
from jaxmoe.model.moe.routers_from_config import record_from_config
from jaxmoe.model.params import param_specs, value_head_specs
from jaxmoe.model.trainable import split_params
from jaxmoe.model.weights import keeps_reference, weights_of
from jaxmoe.parallel.limits import check_host
from jaxmoe.parallel.param_bytes import (
    copy_bytes,
    count_local_entries,
    packed_bytes,
)
from jaxmoe.parallel.sharding import RULES
from jaxmoe.rl.scorer import find_recorded_sizes
from jaxmoe.rl.state import Trained
from jaxmoe.run.optimizer_memory import muon_work_bytes, optimizer_bytes
from jaxmoe.run.policy_memory import (
    POLICY_STAGES,
    base_bytes,
    policy_stage_bytes,
    teacher_bytes,
)
from jaxmoe.run.routing_memory import routing_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on one device in the RL stage."""

    weights: int  # of policy and critic; of a LoRA run the adapters
    rounded: int  # experts in four bits that a step reads, of policy and reference
    packed: int  # frozen experts of a LoRA run, in four bits
    frozen: int  # other frozen weights of a LoRA run, in the dtypes that they are read in
    rows: int  # rows of an embedding in host memory: those of a step's tokens
    table: int  # all rows of it, while sampling
    optimizer: int  # what the optimizer keeps, unless it is on the host
    reference: int  # trained weights as they were before RL, for the KL or as the teacher
    teacher: int  # a second model, or the words that a server lists
    engine_copy: int  # the engine's copy of the policy's weights
    gathered: (
        int  # gathered weights of a period of layers, except experts; their gradients in float32
    )
    gradients: int  # with microbatches including their float32 sum
    update: int  # the optimizer's updates; of Muon also what it computes them from
    activations: int  # of one microbatch, forward and backward
    routing: int  # what the router did, for all tokens of a batch
    cache: int  # keys and values while sampling, also those of an evaluation
    ahead: int  # cache and older weights of an engine that samples during the step
    host: int  # in host memory: moments, inputs of periods of layers, an embedding

    def bytes_by_part(self, stage: str) -> dict[str, int]:
        """Return the parts in memory during a stage: training, sampling or syncing."""
        base = "packed", "frozen"
        resident = ("weights", *base, "optimizer", "reference", "teacher", "engine_copy")
        names = {
            "training": (
                *resident,
                "rounded",
                "rows",
                "gathered",
                "gradients",
                "update",
                "activations",
                "routing",
                "ahead",
            ),
            "sampling": (*resident, "table", "cache"),
            "syncing": (*resident, "rounded", "ahead"),
        }[stage]
        parts = {name: getattr(self, name) for name in names}
        # The old and the new copy of the engine exist at the same time.
        if stage == "syncing":
            parts["engine_copy"] *= 2
        return parts

    @property
    def state(self) -> int:
        """Bytes that stay from step to step, without a LoRA run's base and the engine."""
        return self.weights + self.optimizer + self.reference + self.teacher

    @property
    def training(self) -> int:
        return sum(self.bytes_by_part("training").values())

    @property
    def sampling(self) -> int:
        return sum(self.bytes_by_part("sampling").values())


def plan_memory(cfg: Config) -> Memory:
    """Return bytes per device: exact except for activations, of which live arrays are counted.

    Weights are cast and gathered one layer at a time, forward and backward. XLA gathers the other
    layers of a period concurrently, and holds the gradients of all in float32 until they are
    reduce-scattered. For 20B and 120B on H200s XLA reports 4 to 12 % more for the step.

    Activations are those of the microbatch's tokens on one device, with a prompt for each sample:
    rows with shared prompts hold no more, and the warm start has none. With remat they are the
    input of each period of layers, with optim.remat_keeps=attention also (o, lse) of each layer,
    and the working set of one period; without remat, the working set of every layer. The gradient
    of a working set is as large. A layer's working set is its norm outputs, q, k, v, the
    attention's output and lse, and per active expert one row of input, gate, up, hidden and output;
    with optim.expert_tokens, rows of that many tokens. With frozen weights only one layer of a
    period has gradients at a time. A teacher's forward has no gradient, and needs less than the
    backward pass that follows it.
    A critic's own backbone saves as much for the backward pass as the policy, at the same time.
    For a CPU in float32 XLA reports up to 2 % more with remat, up to two fifths more without.
    """
    m, mesh = cfg.model, cfg.mesh
    policy, own_backbone = param_specs(m), cfg.critic.backbone == "own"
    backbone = {name: spec for name, spec in policy.items() if own_backbone and name != "head"}
    value_head = {} if cfg.critic.backbone == "none" else value_head_specs(m)
    local_critic = count_local_entries(backbone, cfg)
    weights = weights_of(cfg)
    dtype, weight_bytes = weights.dtype, weights.dtype.itemsize
    compute_bytes = jnp.dtype(m.dtype).itemsize
    policy = weights.trained
    trained_policy = split_params(policy, cfg.trainable)[0]
    local_trained = count_local_entries(trained_policy, cfg)
    local_frozen = count_local_entries(policy, cfg) - local_trained
    trained = local_trained + local_critic + count_local_entries(value_head, cfg)
    packed = cfg.optim.tokens_per_microbatch // cfg.context  # rows
    tokens = microbatch_rows(cfg) * cfg.context // mesh.sequence
    summed = packed or cfg.optim.microbatches > cfg.loss.minibatches  # several per update
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim // mesh.tensor
    routed = cfg.computed_experts * (2 * m.d_model + 3 * m.d_expert)
    expert_tokens = min(tokens, cfg.optim.expert_tokens or tokens)
    # The all-to-all of experts uses buffers of twice the size.
    if mesh.expert * mesh.tensor > 1:
        routed, expert_tokens = routed * 2 // mesh.tensor, tokens
    rows = 2 * expert_tokens * compute_bytes * routed  # and their gradient
    arrays = tokens * (compute_bytes * (4 * m.d_model + heads) + 4 * (m.n_q_heads + m.n_experts))
    layer = 2 * arrays + rows
    period = len(m.plan.blocks[0])  # layers that one step of the scan runs
    inputs = sum(block[0].size for block in m.plan.blocks) * tokens * m.d_model * compute_bytes
    inputs_on_host = cfg.optim.remat_inputs == "host"
    saved_activations = (0 if inputs_on_host else inputs) if cfg.optim.remat else m.n_layers * layer
    # Even without remat the backward pass recomputes the rows of a chunk.
    if expert_tokens < tokens and not cfg.optim.remat:
        saved_activations -= (m.n_layers - 1) * rows
    critic = {"value_head": value_head, "backbone": backbone}
    moments = optimizer_bytes(cfg, Trained(trained_policy, critic if value_head else None), dtype)
    host_moments = moments if cfg.optim.moments == "host" else 0
    if cfg.optim.remat_keeps:
        saved_activations += m.n_layers * tokens * m.n_q_heads * (m.head_dim * compute_bytes + 4)
    # Recorded arrays are results of the layers, which remat does not drop; with their gradients.
    if cfg.router.record or cfg.router.term_weights or cfg.router.instruments:
        record = record_from_config(cfg.router, m.experts_per_token)
        recorded = sum(math.prod(x) for x in find_recorded_sizes(record, m).values())
        saved_activations += 3 * 4 * recorded * tokens
    engine, older = describe_engine(cfg).memory(cfg), cfg.rollout.older_versions
    ahead = engine.cache + older * engine.weights if older else 0
    # A batch that is sampled ahead ends before an evaluation; groups go on beside it.
    beside_evaluation = ahead if cfg.rollout.schedule == "groups" else 0
    packed, frozen, table = base_bytes(cfg)
    frozen_arrays = (period - 1) * arrays if weights.base else 0
    has_host_table = cfg.lora.embedding_rows > 0
    return Memory(
        weights=(trained + local_frozen) * weight_bytes,
        rounded=packed_bytes(weights.rounded, cfg) * (1 + keeps_reference(cfg)),
        packed=packed,
        frozen=frozen if has_host_table else frozen + table,
        rows=cfg.lora.embedding_rows * m.d_model * compute_bytes,
        table=table if has_host_table else 0,
        optimizer=moments - host_moments,
        reference=local_trained * weight_bytes if keeps_reference(cfg) else 0,
        teacher=teacher_bytes(cfg),
        engine_copy=engine.weights,
        gathered=period * (1 + 4 // compute_bytes) * layer_bytes(cfg) if mesh.devices > 1 else 0,
        gradients=trained * (weight_bytes + 4 if summed else weight_bytes),
        update=trained * weight_bytes + (muon_work_bytes(cfg) if cfg.optim.is_muon else 0),
        activations=saved_activations * (2 if own_backbone else 1)
        + (period * layer - frozen_arrays if cfg.optim.remat else 0),
        routing=routing_bytes(cfg),
        cache=max(engine.cache, engine.evaluation_cache + beside_evaluation),
        ahead=ahead + (table if has_host_table and older else 0),
        host=host_moments
        + (inputs * (2 if own_backbone else 1) if inputs_on_host else 0)
        + (table if has_host_table else 0),
    )


def stage_bytes(cfg: Config, stage: str) -> dict[str, int]:
    """Bytes on one device by part, in a stage of a training or of another command."""
    if stage in POLICY_STAGES:
        return policy_stage_bytes(cfg, stage)
    return plan_memory(cfg).bytes_by_part(stage)


def microbatch_rows(cfg: Config) -> int:
    """Rows of a microbatch on one device, or shared along mesh.sequence."""
    rows = cfg.optim.tokens_per_microbatch // cfg.context
    rows = rows or cfg.rollout.sequences_per_step / cfg.optim.microbatches
    return max(1, math.ceil(rows / cfg.mesh.row_shards))


@dataclass(frozen=True)
class LayerFlops:
    """Floating-point operations of the matmuls in all layers for one sequence of full length."""

    linear: int  # projections, router and the active experts
    attention: int  # over visible pairs of tokens

    def recomputed_flops(self, cfg: Config) -> int:
        """Operations of the forward that the backward pass repeats."""
        if not cfg.optim.remat:
            return 0
        return self.linear + (0 if cfg.optim.remat_keeps else self.attention)


def layer_flops(cfg: Config, tokens: int | None = None) -> LayerFlops:
    """FLOPs of the forward of `tokens`, by default of a sequence of full length.

    linear = 2·T·(D·(2N + 2K)·H + D·E + A·3·D·F) per layer; attention = 4·N·H·(visible pairs)

    A backward has at least 2 times the linear and 2.5 times the attention FLOPs.
    """
    m, T = cfg.model, cfg.context if tokens is None else tokens
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim
    weights = m.d_model * (heads + m.n_experts + 3 * cfg.computed_experts * m.d_expert)
    windows = [min(kind.window or T, T) for kind in m.plan.kinds]
    # A window grows up to its size and then stays.
    pairs = sum(w * (w + 1) // 2 + (T - w) * w for w in windows)
    return LayerFlops(
        linear=m.n_layers * 2 * T * weights, attention=4 * m.n_q_heads * m.head_dim * pairs
    )


def check_memory(cfg: Config, *stages: str) -> None:
    """Raise ConfigError if the largest of these stages does not fit into this machine's memory.

    `stages` are those of `stage_bytes`. A mesh for other machines is not checked.
    """
    if cfg.mesh.devices not in (1, jax.device_count()):
        return
    if not set(stages) & set(POLICY_STAGES):
        check_host(cfg, plan_memory(cfg).host)
    if (available := device_bytes()) is None:
        return
    has_device_memory = jax.local_devices()[0].platform != "cpu"
    # Devices of a CPU share the host's memory.
    if not has_device_memory:
        available //= cfg.mesh.devices
        # What a config moves to the host's memory is then in the same memory, and is counted too.
        cfg = override(cfg, "optim.moments=device", "optim.remat_inputs=device")
    # Stages follow each other, so only the largest must fit.
    largest = max(stages, key=lambda name: _bytes_needed(cfg, name))
    needed = _bytes_needed(cfg, largest)
    if needed <= available:
        return
    name, size = max(stage_bytes(cfg, largest).items(), key=lambda item: item[1])
    candidate, changes = find_smaller_config(cfg, largest, available, host=has_device_memory)
    if _bytes_needed(candidate, largest) <= available:
        advice = f"Try {' '.join(changes)}, which needs"
    else:
        advice = (
            f"Try a smaller model or a larger machine: with {' '.join(changes) or 'any'} it needs"
        )
    raise ConfigError(
        f"{largest} must fit into the {available:,} bytes that are free on this machine "
        f"({_short(available)}), and needs {needed:,} ({_short(needed)}), most of it for {name} "
        f"({_short(size)}). {advice} "
        f"{_short(_bytes_needed(candidate, largest))}."
    )


def find_smaller_config(
    cfg: Config, stage: str, available: int, host: bool = True
) -> tuple[Config, list[str]]:
    """Return the first config that fits, or the smallest one tried, and its changes."""
    candidate, changes = cfg, []
    for key, value in _memory_saving_options(cfg, host):
        if _bytes_needed(candidate, stage) <= available:
            break
        try:
            next_candidate = override(candidate, f"{key}={value}")
        except ConfigError:  # it does not fit the other settings
            continue
        # A setting that saves nothing in this stage is not suggested.
        if _bytes_needed(next_candidate, stage) < _bytes_needed(candidate, stage):
            candidate, changes = next_candidate, [*changes, f"--set {key}={value}"]
    return candidate, changes


def _bytes_needed(cfg: Config, stage: str) -> int:
    return sum(stage_bytes(cfg, stage).values())


def device_bytes() -> int | None:
    """Bytes that this process may use on its device; None if unknown."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return count_free_bytes() if limit is None and device.platform == "cpu" else limit


def _memory_saving_options(cfg: Config, host: bool) -> Iterator[tuple[str, object]]:
    """Yield settings that need less memory, the ones that cost the least time first."""
    yield "optim.remat", True
    yield "optim.remat_keeps", ""
    yield "optim.expert_tokens", 1024
    yield "rollout.max_parallel_sequences", max(8, cfg.rollout.samples_per_prompt)
    if cfg.optim.tokens_per_microbatch:
        yield "optim.tokens_per_microbatch", cfg.context
    else:
        sizes = [cfg.rollout.sequences_per_step]
        sizes += [cfg.warmup.sequences_per_step] if cfg.warmup.steps else []
        yield "optim.microbatches", math.gcd(*sizes)
    # Only a device with memory of its own can gain from the host's.
    if host:
        yield "optim.moments", "host"
        yield "optim.remat_inputs", "host"
        yield "lora.embedding_rows", 16_384  # refused without LoRA
    yield "optim.param_dtype", "bfloat16"


def layer_bytes(cfg: Config) -> int:
    """Bytes of one layer's gathered weights; experts, and heads over tensor, stay sharded."""
    layers = param_specs(cfg.model)["layers"]
    cut = {name: ("tensor",) for name in ("heads", "kv")} | {"expert": RULES["expert"]}
    return copy_bytes(layers, cfg, cut) // cfg.model.n_layers


def _short(value: int) -> str:
    return " ".join(format_bytes(value).split())


def format_bytes(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:9.2f} {unit}"
    return f"{value:9d} B"
