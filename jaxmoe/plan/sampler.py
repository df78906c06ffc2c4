# SPDX-License-Identifier: Apache-2.0
"""The native engine's prefill and decode, compiled for devices that are not here.

They are the programs that the run's engine jits, for a wave of the longest prompts.
Next: jaxmoe/plan/roofline.py.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import Config
from jaxmoe.engines import open_engine
from jaxmoe.memory import plan_memory
from jaxmoe.model import make_ops
from jaxmoe.parallel.sharding import drop_unit_axes, mesh_spec
from jaxmoe.plan.collectives import Collective, collectives
from jaxmoe.plan.compiled import TooLarge, policy_shapes, too_large
from jaxmoe.records import Sampling
from jaxmoe.rollout.native import NativeEngine
from pallas_kernels.ahead_of_time import compile_jitted
from pallas_kernels.dispatch import Impl


@dataclass(frozen=True)
class Wave:
    """Prefill and decode of `prompts` prompts; bytes are one device's."""

    prompts: int
    prefill: int  # bytes
    decode: int
    before: Counter[Collective]  # of prefill
    token: Counter[Collective]  # of one turn of decode's loop
    seconds: float  # of compiling

    @property
    def live(self) -> int:
        return max(self.prefill, self.decode)


def compiled_wave(cfg: Config, mesh: Mesh, impls: Mapping[str, Impl]) -> Wave | TooLarge:
    """The engine's programs on `mesh_on`'s mesh. Raises whatever else the compiler refuses."""
    r, of_run = cfg.rollout, mesh if cfg.mesh.devices > 1 else None
    engine = open_engine(cfg, make_ops(cfg, impls), Path(), of_run)
    assert isinstance(engine, NativeEngine)
    around = drop_unit_axes(mesh) if of_run else mesh

    def make(jitted: Any, *shapes: Any, **static: Any) -> jax.stages.Compiled:
        shapes = jax.tree.map(partial(lying_on, around), shapes)
        return compile_jitted(around, jitted, *shapes, **static)

    sampling = Sampling(r.max_new_tokens, (0,), r.temperature, r.top_k, r.top_p)
    began = time.perf_counter()
    try:
        prefill, decode = engine.compile_programs(
            make, sampling, policy_shapes(cfg), samples=r.samples_per_prompt
        )
    except jax.errors.JaxRuntimeError as error:
        mem, seconds = plan_memory(cfg), time.perf_counter() - began
        if (found := too_large(str(error), mem.engine_copy + mem.cache, seconds)) is None:
            raise
        return found
    seconds, text = time.perf_counter() - began, decode.as_text() or ""
    once, twice = (collectives(text, mesh.size, turns) for turns in (0, 1))
    twice.subtract(once)
    return Wave(
        engine.prompts_per_batch(r.samples_per_prompt), live(prefill), live(decode),
        collectives(prefill.as_text() or "", mesh.size), +twice, seconds,
    )  # fmt: skip


def lying_on(mesh: Mesh, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same place by the axes of this mesh, which has all that cut something."""
    at = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
    each = ((cut,) if isinstance(cut, str) else cut or () for cut in at)
    spec = mesh_spec(*(tuple(name for name in names if name in mesh.shape) for names in each))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def live(program: jax.stages.Compiled) -> int:
    """Bytes of arguments, temporaries, and results that take the place of no argument."""
    memory: Any = program.memory_analysis()
    made = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return memory.argument_size_in_bytes + made - memory.alias_size_in_bytes


def waves(cfg: Config, prompts: int) -> int:
    """How often a step's prompts make the engine run."""
    return -(-cfg.rollout.prompts_per_step // prompts)
