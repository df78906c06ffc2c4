# SPDX-License-Identifier: Apache-2.0
"""Memory of the commands that use a policy and train nothing: export, eval, doctor.

Of a checkpoint they read neither optimizer nor reference nor critic. Back: jaxmoe/run/memory.py.
"""

import math

import jax
import jax.numpy as jnp

from jaxmoe.config import Config, describe_engine
from jaxmoe.model.params import param_specs
from jaxmoe.model.trainable import policy_specs
from jaxmoe.parallel.param_bytes import copy_bytes, count_local_entries, full_copy_bytes
from jaxmoe.parallel.sampling_copy import peak_of_moves
from jaxmoe.parallel.sharding import sampling_rules

POLICY_STAGES = ("exporting", "evaluating", "scoring")


def base_bytes(cfg: Config) -> tuple[int, int, int]:
    """Bytes of a LoRA run's frozen weights: experts, other weights, the embedding table."""
    specs = param_specs(cfg.model)
    table = specs.pop("embed")
    experts = [spec for spec in jax.tree.leaves(specs) if spec.is_packable]
    dense = [spec for spec in jax.tree.leaves(specs) if not spec.is_packable]
    return (
        # Four bits for each value, and one byte for 32 of them.
        sum(math.prod(spec.shape) * 17 // 32 for spec in experts),
        full_copy_bytes(dense, cfg),
        full_copy_bytes(table, cfg),
    )


def policy_stage_bytes(cfg: Config, stage: str) -> dict[str, int]:
    """Bytes on one device by part; scoring compares an engine with the weights."""
    itemsize = 4 if cfg.lora.ranks else jnp.dtype(cfg.optim.param_dtype).itemsize
    specs = jax.tree.leaves(policy_specs(cfg.model, cfg.lora))
    packed, frozen, table = base_bytes(cfg) if cfg.lora.ranks else (0, 0, 0)
    stored = [count_local_entries(spec, cfg) * itemsize for spec in specs]
    parts = {"weights": sum(stored), "packed": packed, "frozen": frozen, "table": table}
    if stage == "exporting":
        return parts
    engine = describe_engine(cfg).memory(cfg)
    sampling = {"engine_copy": engine.weights, "cache": engine.cache}
    moves = cfg.rollout.engine == "native" and not cfg.lora.ranks and cfg.quant.experts == "none"
    if stage == "scoring" or not moves:
        return parts | sampling
    # Each array is deleted when the engine's copy of it is made.
    rules = sampling_rules(cfg.model).rules
    peak = peak_of_moves(stored, [copy_bytes(spec, cfg, rules) for spec in specs])
    moving = {"weights": sum(stored), "engine_copy": peak - sum(stored)}
    return max((moving, sampling), key=lambda parts: sum(parts.values()))
