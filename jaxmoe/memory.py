# SPDX-License-Identifier: Apache-2.0
"""What a run would need and do, computed from shapes alone; it is refused where memory is short.

No weight is read or made, whatever the size. Next: jaxmoe/dry_run.py prints it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxmoe.config import Config, ConfigError
from jaxmoe.config_file import override
from jaxmoe.model.cache import cache_bytes
from jaxmoe.model.lora import Pair, lora_specs
from jaxmoe.model.params import param_specs, read_dtype, value_head_specs
from jaxmoe.parallel.host import count_free_bytes
from jaxmoe.parallel.limits import check_host
from jaxmoe.parallel.sharding import RULES, Names, local_shape, sampling_rules
from jaxmoe.rollout.native import prompts_per_batch
from jaxmoe.shapes import Leaf


@dataclass(frozen=True)
class Memory:
    """Bytes on one device in the RL stage."""

    weights: int  # as held and updated, a critic's too; of a LoRA run the adapters
    packed: int  # frozen experts beside adapters, in four bits
    frozen: int  # the other frozen weights beside adapters, as they are read
    rows: int  # of an embedding that waits on the host: those of a step's tokens
    table: int  # all of it, while sampling
    optimizer: int  # two moments, unless they are on the host
    reference: int  # frozen weights of the KL term
    engine_copy: int  # of the policy's weights, as the native engine reads them
    gathered: int  # of a pair of layers, whole but for cut experts, and gradients in float32
    gradients: int  # with microbatches, their float32 sum as well
    update: int  # what the optimizer makes of them
    activations: int  # of one microbatch, forward and backward
    cache: int  # keys and values while sampling
    ahead: int  # cache and older weights of an engine that samples during the step
    host: int  # not on the device: moments, inputs of layer pairs and an embedding on its host

    def bytes_by_part(self, stage: str) -> dict[str, int]:
        """What is there at one time: in "training", "sampling", "syncing" weights, "scoring"."""
        base = "packed", "frozen"
        held = ("weights", *base, "optimizer", "reference", "engine_copy")
        names = {
            "training": (*held, "rows", "gathered", "gradients", "update", "activations", "ahead"),
            "sampling": (*held, "table", "cache"),
            "syncing": (*held, "ahead"),
            "scoring": ("weights", *base, "table", "engine_copy", "cache"),  # without a run
        }[stage]
        parts = {name: getattr(self, name) for name in names}
        if stage == "syncing":  # the new copy is made before the old one goes
            parts["engine_copy"] *= 2
        return parts

    @property
    def training(self) -> int:
        return sum(self.bytes_by_part("training").values())

    @property
    def sampling(self) -> int:
        return sum(self.bytes_by_part("sampling").values())


def plan_memory(cfg: Config) -> Memory:
    """Bytes per device; exact but for activations, which count the arrays that must be live.

    Weights are cast, and gathered, one layer at a time, forward and backward; XLA gathers the
    other layer of a pair meanwhile, and holds both layers' gradients in float32 until they are
    reduce-scattered. For 20B and 120B on H200s its own figure of the step is 4 to 12 % above.

    Activations of M = microbatch tokens on one device: with remat the input of each layer pair,
    with optim.remat_keeps=attention each layer's (o, lse), and one pair's working set, else the
    working set of every layer; and its gradient, as large again. A layer's working set is its norm
    outputs, q, k, v, the attention's output and lse, and per active expert one row of input, gate,
    up, hidden and output; rows of optim.expert_tokens at a time, where that is set. Beside frozen
    weights one layer of a pair has its gradients at a time. A critic's own backbone keeps as much
    for its backward pass as the policy, at the same time.
    XLA's own figure for a CPU, in float32: with remat within 2 %; without up to two fifths above.
    """
    m, mesh = cfg.model, cfg.mesh
    policy, own = param_specs(m), cfg.critic.backbone == "own"
    backbone = {name: spec for name, spec in policy.items() if own and name != "head"}
    value_head = {} if cfg.critic.backbone == "none" else value_head_specs(m)
    local = _local_size(policy, cfg)
    local_critic = _local_size(backbone, cfg)
    lora, held = bool(cfg.lora.ranks), jnp.dtype(cfg.optim.param_dtype).itemsize
    fast = jnp.dtype(m.dtype).itemsize
    if lora:
        policy, held = lora_specs(m, cfg.lora), 4
        local = _local_size(policy, cfg)
    trained = local + local_critic + _local_size(value_head, cfg)
    packed = cfg.optim.tokens_per_microbatch // cfg.context  # rows
    tokens = microbatch_rows(cfg) * cfg.context // mesh.sequence
    summed = packed or cfg.optim.microbatches > cfg.loss.minibatches  # more than one an update
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim // mesh.tensor
    routed = m.experts_per_token * (2 * m.d_model + 3 * m.d_expert)
    at_once = min(tokens, cfg.optim.expert_tokens or tokens)
    if mesh.expert * mesh.tensor > 1:  # the share of what travels, in buffers of twice as much
        routed, at_once = routed * 2 // mesh.tensor, tokens
    rows = 2 * at_once * fast * routed  # and their gradient
    arrays = tokens * (fast * (4 * m.d_model + heads) + 4 * (m.n_q_heads + m.n_experts))
    layer = 2 * arrays + rows
    inputs, away = m.n_layers // 2 * tokens * m.d_model * fast, cfg.optim.remat_inputs == "host"
    kept = (0 if away else inputs) if cfg.optim.remat else m.n_layers * layer
    if at_once < tokens and not cfg.optim.remat:  # a chunk's rows are made again
        kept -= (m.n_layers - 1) * rows
    moments_there = 2 * trained * held if cfg.optim.moments == "host" else 0
    if cfg.optim.remat_keeps:
        kept += m.n_layers * tokens * m.n_q_heads * (m.head_dim * fast + 4)
    native, ahead = cfg.rollout.engine == "native", cfg.rollout.max_staleness > 0
    engine_copy = copy_bytes(policy, cfg, sampling_rules(cfg.model).rules) if native else 0
    if lora and native:  # it reads the base in place
        engine_copy = adapter_copy_bytes(cfg)
    shards, samples = mesh.row_shards * mesh.sequence, cfg.rollout.samples_per_prompt
    wave = prompts_per_batch(cfg.rollout.max_parallel_sequences, samples, shards)
    engine_rows = wave // shards * samples
    cache = cache_bytes(m, engine_rows, cfg.context) if native else 0
    packed, frozen, table = base_bytes(cfg) if lora else (0, 0, 0)
    rows_there = cfg.lora.embedding_rows > 0
    return Memory(
        weights=trained * held,
        packed=packed,
        frozen=frozen if rows_there else frozen + table,
        rows=cfg.lora.embedding_rows * m.d_model * fast,
        table=table if rows_there else 0,
        optimizer=2 * trained * held - moments_there,
        reference=local * held if cfg.loss.kl_coef > 0 and not lora else 0,
        engine_copy=engine_copy,
        gathered=2 * (1 + 4 // fast) * layer_bytes(cfg) if mesh.devices > 1 else 0,
        gradients=trained * (held + 4 if summed else held),
        update=trained * held,
        activations=kept * (2 if own else 1)
        + ((2 * layer - (arrays if lora else 0)) if cfg.optim.remat else 0),
        cache=cache,
        ahead=cache + engine_copy + (table if rows_there else 0) if ahead else 0,
        host=moments_there
        + (inputs * (2 if own else 1) if away else 0)
        + (table if rows_there else 0),
    )


def base_bytes(cfg: Config) -> tuple[int, int, int]:
    """Of the frozen weights of a LoRA run: experts, other weights, the embedding's table."""
    specs = param_specs(cfg.model)
    table = specs.pop("embed")
    experts = [spec for spec in jax.tree.leaves(specs) if spec.is_packable]
    others = [spec for spec in jax.tree.leaves(specs) if not spec.is_packable]
    return (
        sum(math.prod(spec.shape) * 17 // 32 for spec in experts),  # a byte for two, one for 32
        _read_bytes(others, cfg),
        _read_bytes(table, cfg),
    )


def adapter_copy_bytes(cfg: Config) -> int:
    """Of what an engine copies of a LoRA run: adapters, and what is trained whole as it is read."""
    specs = lora_specs(cfg.model, cfg.lora)
    tops = [spec for name, spec in specs.items() if name != "layers"]
    leaves = [leaf for layer in specs["layers"].values() for leaf in layer.values()]
    pairs = [leaf for leaf in leaves if isinstance(leaf, Pair)]
    whole = [*tops, *(leaf for leaf in leaves if not isinstance(leaf, Pair))]
    return 4 * _local_size(pairs, cfg) + _read_bytes(whole, cfg)


def _read_bytes(specs: Leaf, cfg: Config) -> int:
    """Of parameters held in float32, or in what they are read in."""
    return sum(
        math.prod(spec.shape) * read_dtype(spec, cfg.model, "float32").itemsize
        for spec in jax.tree.leaves(specs)
    )


def microbatch_rows(cfg: Config) -> int:
    """Rows of a microbatch that one device has, or shares with those along mesh.sequence."""
    rows = cfg.optim.tokens_per_microbatch // cfg.context
    rows = rows or cfg.rollout.sequences_per_step / cfg.optim.microbatches
    return max(1, math.ceil(rows / cfg.mesh.row_shards))


@dataclass(frozen=True)
class LayerFlops:
    """Floating-point operations of matmuls in all layers, of one sequence of full length."""

    linear: int  # projections, router and the active experts
    attention: int  # of visible pairs

    def recomputed_flops(self, cfg: Config) -> int:
        """What a backward pass does again of a forward."""
        if not cfg.optim.remat:
            return 0
        return self.linear + (0 if cfg.optim.remat_keeps else self.attention)


def layer_flops(cfg: Config, tokens: int | None = None) -> LayerFlops:
    """Forward of `tokens`, by default a sequence of full length.

    A backward takes twice the linear ones, and 2.5 times attention's, at least.

    linear = 2·T·(D·(2N + 2K)·H + D·E + A·3·D·F) a layer; attention = 4·N·H·(visible pairs)
    """
    m, T = cfg.model, cfg.context if tokens is None else tokens
    heads = (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim
    weights = m.d_model * (heads + m.n_experts + 3 * m.experts_per_token * m.d_expert)
    window = min(m.sliding_window, T)
    pairs = T * (T + 1) // 2 + window * (window + 1) // 2 + (T - window) * window
    half = m.n_layers // 2
    return LayerFlops(
        linear=m.n_layers * 2 * T * weights, attention=half * 4 * m.n_q_heads * m.head_dim * pairs
    )


def check_memory(cfg: Config, *stages: str) -> None:
    """Raises ConfigError where the largest of these stages has no place on this machine.

    `stages` are those of Memory.bytes_by_part. Nothing is asked for a mesh of other machines.
    """
    if cfg.mesh.devices not in (1, jax.device_count()):
        return
    check_host(cfg, plan_memory(cfg).host)
    if (there := device_bytes()) is None:
        return
    if not (apart := jax.local_devices()[0].platform != "cpu"):  # they share the host's memory
        there //= cfg.mesh.devices
        cfg = override(cfg, "optim.moments=device", "optim.remat_inputs=device")
    largest = max(stages, key=lambda name: _bytes_needed(cfg, name))
    need = _bytes_needed(cfg, largest)
    if need <= there:
        return
    name, most = max(plan_memory(cfg).bytes_by_part(largest).items(), key=lambda item: item[1])
    tried, changes = find_smaller_config(cfg, largest, there, host=apart)
    if _bytes_needed(tried, largest) <= there:
        advice = f"Try {' '.join(changes)}, which needs"
    else:
        advice = (
            f"Try a smaller model or a larger machine: with {' '.join(changes) or 'any'} it needs"
        )
    raise ConfigError(
        f"{largest} must fit into the {there:,} bytes that are free here ({_short(there)}), and "
        f"needs {need:,} ({_short(need)}), most of it for {name} ({_short(most)}). {advice} "
        f"{_short(_bytes_needed(tried, largest))}."
    )


def find_smaller_config(
    cfg: Config, stage: str, there: int, host: bool = True
) -> tuple[Config, list[str]]:
    """The first config that needs no more than `there`, or the least that is known; its changes."""
    tried, changes = cfg, []
    for key, value in _memory_saving_options(cfg, host):
        if _bytes_needed(tried, stage) <= there:
            break
        try:
            other = override(tried, f"{key}={value}")
        except ConfigError:  # it does not suit the rest
            continue
        if _bytes_needed(other, stage) < _bytes_needed(tried, stage):
            tried, changes = other, [*changes, f"--set {key}={value}"]
    return tried, changes


def scoring_stage(cfg: Config) -> str:
    """What eval and doctor go through: a run's checkpoint brings its moments along."""
    return "sampling" if (Path(cfg.workdir) / "checkpoints").is_dir() else "scoring"


def _bytes_needed(cfg: Config, stage: str) -> int:
    return sum(plan_memory(cfg).bytes_by_part(stage).values())


def device_bytes() -> int | None:
    """Bytes that this process may use of its device; None where nobody says."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return count_free_bytes() if limit is None and device.platform == "cpu" else limit


def _memory_saving_options(cfg: Config, host: bool) -> Iterator[tuple[str, object]]:
    """What takes less memory, the cheapest first."""
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
    if host:  # has memory apart from the device's
        yield "optim.moments", "host"
        yield "optim.remat_inputs", "host"
        yield "lora.embedding_rows", 16_384  # refused where nothing is frozen
    yield "optim.param_dtype", "bfloat16"


def _local_size(specs: Leaf, cfg: Config, rules: Mapping[str, Names] = RULES) -> int:
    """Entries of these parameters on one device."""
    sizes = cfg.mesh.sizes
    return sum(
        math.prod(local_shape(s.shape, s.axes, sizes, rules)) for s in jax.tree.leaves(specs)
    )


def layer_bytes(cfg: Config) -> int:
    """Bytes of one layer as it is computed with: whole, but for experts, and heads over tensor."""
    layers = param_specs(cfg.model)["layers"]
    cut = {name: ("tensor",) for name in ("heads", "kv")} | {"expert": RULES["expert"]}
    return copy_bytes(layers, cfg, cut) // cfg.model.n_layers


def copy_bytes(specs: Leaf, cfg: Config, rules: Mapping[str, Names] = RULES) -> int:
    """Bytes of these parameters on one device, in the dtypes they are read in."""
    return sum(
        _local_size(spec, cfg, rules) * read_dtype(spec, cfg.model, cfg.optim.param_dtype).itemsize
        for spec in jax.tree.leaves(specs)
    )


def _short(value: int) -> str:
    return " ".join(format_bytes(value).split())


def format_bytes(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:9.2f} {unit}"
    return f"{value:9d} B"
