# SPDX-License-Identifier: Apache-2.0
"""Memory of the commands that use a policy and train nothing: export, eval, doctor.

Of a checkpoint they read neither optimizer nor reference nor critic. Back: jaxmoe/run/memory.py.
"""

import jax

from jaxmoe.checkpoint.teacher_weights import find_teacher
from jaxmoe.config import Config, describe_engine
from jaxmoe.model.params import param_specs, read_dtype
from jaxmoe.model.weights import weights_of
from jaxmoe.parallel.param_bytes import copy_bytes, count_local_entries, packed_bytes
from jaxmoe.parallel.sampling_copy import peak_of_moves
from jaxmoe.parallel.sharding import sampling_rules

POLICY_STAGES = ("exporting", "evaluating", "scoring")


def base_bytes(cfg: Config) -> tuple[int, int, int]:
    """Bytes of the frozen weights under adapters: experts, other weights, the embedding table."""
    specs = dict(weights_of(cfg).base)
    table = specs.pop("embed", [])
    experts = [spec for spec in jax.tree.leaves(specs) if spec.is_packable]
    dense = [spec for spec in jax.tree.leaves(specs) if not spec.is_packable]
    return packed_bytes(experts, cfg), copy_bytes(dense, cfg), copy_bytes(table, cfg)


def teacher_bytes(cfg: Config) -> int:
    """Bytes of a second model on one device, or of the words that a server lists for a batch: ids
    and log-probs of four bytes each."""
    if not cfg.distill.has_folder:
        tokens = cfg.rollout.sequences_per_step * cfg.context
        return 8 * cfg.distill.top_k * tokens // (cfg.mesh.row_shards * cfg.mesh.sequence)
    teacher = find_teacher(cfg)
    packs = teacher.is_packed and cfg.mesh.devices == 1
    total = 0
    for spec in jax.tree.leaves(param_specs(teacher.model)):
        if packs and spec.is_packable:
            total += packed_bytes(spec, cfg)
        else:
            dtype = read_dtype(spec, teacher.model, "float32")
            total += count_local_entries(spec, cfg) * dtype.itemsize
    return total


def policy_stage_bytes(cfg: Config, stage: str) -> dict[str, int]:
    """Bytes on one device by part; scoring compares an engine with the weights."""
    weights, (packed, frozen, table) = weights_of(cfg), base_bytes(cfg)
    specs = jax.tree.leaves(weights.trained)
    stored = [count_local_entries(spec, cfg) * weights.dtype.itemsize for spec in specs]
    parts = {"weights": sum(stored), "packed": packed, "frozen": frozen, "table": table}
    if stage == "exporting":
        return parts
    engine = describe_engine(cfg).memory(cfg)
    sampling = {"engine_copy": engine.weights, "cache": max(engine.cache, engine.evaluation_cache)}
    moves = cfg.rollout.engine == "native" and weights.are_read_as_trained
    if stage == "scoring" or not moves:
        return parts | sampling
    # Each array is deleted when the engine's copy of it is made.
    rules = sampling_rules(cfg.model).rules
    peak = peak_of_moves(stored, [copy_bytes(spec, cfg, rules) for spec in specs])
    moving = {"weights": sum(stored), "engine_copy": peak - sum(stored)}
    return max((moving, sampling), key=lambda parts: sum(parts.values()))
