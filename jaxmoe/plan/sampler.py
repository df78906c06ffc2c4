# SPDX-License-Identifier: Apache-2.0
"""The native engine's prefill and decode, compiled for another machine's devices.

They are the programs that the run's engine jits, for a batch of the longest prompts.
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
from jaxmoe.model import make_ops
from jaxmoe.parallel.sharding import drop_unit_axes, mesh_spec
from jaxmoe.plan.collectives import Collective, count_collectives
from jaxmoe.plan.compiled import TooLarge, parse_too_large, policy_shapes
from jaxmoe.records import Sampling
from jaxmoe.rollout.engine import Compilable, open_engine
from jaxmoe.run.memory import plan_memory
from pallas_kernels.ahead_of_time import compile_jitted
from pallas_kernels.dispatch import Impl


@dataclass(frozen=True)
class CompiledSampler:
    """Prefill and decode of `prompts` prompts; bytes are one device's."""

    prompts: int
    prefill: int  # bytes
    decode: int
    prefill_collectives: Counter[Collective]  # of prefill
    token_collectives: Counter[Collective]  # of one iteration of decode's loop
    seconds: float  # of compiling

    @property
    def live(self) -> int:
        return max(self.prefill, self.decode)


def compile_sampler(
    cfg: Config, mesh: Mesh, impls: Mapping[str, Impl]
) -> CompiledSampler | TooLarge | None:
    """Compile the engine's programs on `mesh_on`'s mesh; None if it has none to compile.

    Raises: compiler errors other than too little memory.
    """
    r, run_mesh = cfg.rollout, mesh if cfg.mesh.devices > 1 else None
    engine = open_engine(cfg, make_ops(cfg, impls), Path(), run_mesh)
    if not isinstance(engine, Compilable):
        return None
    shard_map_mesh = drop_unit_axes(mesh) if run_mesh else mesh

    def make(jitted: Any, *shapes: Any, **static: Any) -> jax.stages.Compiled:
        shapes = jax.tree.map(partial(reshard_shape, shard_map_mesh), shapes)
        return compile_jitted(shard_map_mesh, jitted, *shapes, **static)

    sampling = Sampling(r.max_new_tokens, (0,), r.temperature, r.top_k, r.top_p)
    start = time.perf_counter()
    try:
        prefill, decode = engine.compile_programs(
            make, sampling, policy_shapes(cfg), samples=r.samples_per_prompt
        )
    except jax.errors.JaxRuntimeError as error:
        mem, seconds = plan_memory(cfg), time.perf_counter() - start
        if (too_large := parse_too_large(str(error), mem.engine_copy + mem.cache, seconds)) is None:
            raise
        return too_large
    seconds, text = time.perf_counter() - start, decode.as_text() or ""
    # The number of iterations is not known to the compiler; the difference of one and none is a
    # token's.
    without_loop, with_loop = (count_collectives(text, mesh.size, turns) for turns in (0, 1))
    with_loop.subtract(without_loop)
    return CompiledSampler(
        engine.prompts_per_batch(r.samples_per_prompt),
        live_bytes(prefill),
        live_bytes(decode),
        count_collectives(prefill.as_text() or "", mesh.size),
        +with_loop,
        seconds,
    )


def reshard_shape(mesh: Mesh, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape with the same sharding on this mesh, without axes that the mesh does not have."""
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
    axes = ((cut,) if isinstance(cut, str) else cut or () for cut in spec)
    spec = mesh_spec(*(tuple(name for name in names if name in mesh.shape) for names in axes))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def live_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of arguments, temporaries, and results that do not reuse an argument's memory."""
    memory: Any = program.memory_analysis()
    new_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return memory.argument_size_in_bytes + new_bytes - memory.alias_size_in_bytes


def count_prompt_batches(cfg: Config, prompts: int) -> int:
    """Batches of `prompts` prompts in a step."""
    return -(-cfg.rollout.prompts_per_step // prompts)
