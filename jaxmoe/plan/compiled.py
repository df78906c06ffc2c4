# SPDX-License-Identifier: Apache-2.0
"""The RL step compiled for another machine's devices, and the compiler's figures.

It is the program that train jits, with the same shapes and shardings.
Next: jaxmoe/plan/collectives.py reads its text, jaxmoe/plan/report.py prints the report.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.batches.computed_tokens import count_full_lengths, shared_at_full_lengths
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.checkpoint.teacher_weights import teacher_shapes
from jaxmoe.config import Config
from jaxmoe.model import make_ops
from jaxmoe.model.embedding import EmbeddingRows
from jaxmoe.model.weights import base_shapes, trained_shapes
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import drop_unit_axes, make_mesh, make_one_device_mesh
from jaxmoe.plan.collectives import Collective, TpuKernel, count_collectives, count_tpu_kernels
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import stage_shapes
from jaxmoe.run.engine_weights import make_engine_reader
from jaxmoe.run.memory import microbatch_rows, plan_memory
from jaxmoe.run.programs import batch_shapes, rl_program, sharded_batch_shapes, warmup_optimizer
from jaxmoe.run.teacher import make_teacher
from jaxmoe.shapes import Params
from pallas_kernels.ahead_of_time import compile_on
from pallas_kernels.dispatch import Impl

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step; bytes are one device's."""

    arguments: int  # state and batch
    temporaries: int  # and results that do not reuse an argument's memory
    collectives: Counter[Collective]
    kernels: int  # calls of Pallas kernels in the program's text
    seconds: float  # of compiling
    host: int = 0  # bytes in the memory of a device's host
    tpu_kernels: Counter[TpuKernel] = field(default_factory=Counter)

    @property
    def live(self) -> int:
        return self.arguments + self.temporaries


@dataclass(frozen=True)
class TooLarge:
    """The program does not fit the chip's memory."""

    needs: int  # bytes of one device
    capacity: int
    seconds: float


def mesh_on(cfg: Config, devices: Sequence[Any]) -> Mesh:
    """The run's mesh over these devices, or a mesh of one device."""
    return make_mesh(cfg.mesh, devices) or make_one_device_mesh(devices[0])


def compile_rl_step(cfg: Config, mesh: Mesh, impls: Mapping[str, Impl]) -> CompiledStep | TooLarge:
    """Compile the step on `mesh_on`'s mesh. Raises compiler errors other than too little memory."""
    run_mesh = mesh if cfg.mesh.devices > 1 else None
    a, tx = algorithm_from_config(cfg), rl_optimizer(cfg)
    ops = sharded_ops(make_ops(cfg, impls), run_mesh, cfg.model, method=cfg.mesh.attention)
    state = stage_shapes(cfg, warmup_optimizer(cfg), tx, mesh)["rl"]
    sharing = shared_at_full_lengths(cfg, make_ops(cfg, impls).attend)
    shapes = batch_shapes(cfg, a, sharing)
    arguments = (state, *sharded_batch_shapes(*shapes, mesh), step_base_shapes(cfg))
    teacher = make_teacher(cfg, impls, run_mesh)
    if teacher is not None:
        arguments = (*arguments, teacher_shapes(teacher.folder, run_mesh))
    scorer = None if teacher is None else teacher.scorer
    program = rl_program(cfg, ops, mesh, a, tx, state, teacher=scorer)
    program.check(*arguments)
    start = time.perf_counter()
    try:
        shard_map_mesh = drop_unit_axes(mesh) if run_mesh else mesh  # the mesh of every shard_map
        compiled = compile_on(shard_map_mesh, program.fn, *arguments, **program.options)
    except jax.errors.JaxRuntimeError as error:
        mem, seconds = plan_memory(cfg), time.perf_counter() - start
        state = mem.state
        # A TPU's compiler refuses a program that does not fit. A GPU's compiles it, and its bytes
        # are compared with the chip's later.
        if (compiled := parse_too_large(str(error), state, seconds)) is None:
            raise
        return compiled
    seconds, sizes, text = (
        time.perf_counter() - start,
        compiled.memory_analysis(),
        compiled.as_text(),
    )
    # with packing the number of microbatches is an input of the step
    is_packed = cfg.optim.tokens_per_microbatch > 0 or sharing is not None
    unknown = count_full_lengths(cfg, sharing).updates.microbatches if is_packed else 0
    assert sizes is not None and text is not None, "libtpu and XLA's GPU compiler report both"
    return CompiledStep(
        sizes.argument_size_in_bytes,
        # A donated argument's memory is reused by a result and counts once.
        sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        count_collectives(text, mesh.size, unknown),
        len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu)', text)),
        seconds,
        sizes.host_argument_size_in_bytes
        + sizes.host_temp_size_in_bytes
        + sizes.host_output_size_in_bytes
        - sizes.host_alias_size_in_bytes,
        count_tpu_kernels(text, mesh.size, unknown),
    )


def step_base_shapes(cfg: Config) -> Params | None:
    """`base_shapes` as an argument of the step, where the embedding may be a gather of rows."""
    if (base := base_shapes(cfg)) is None or not (rows := cfg.lora.embedding_rows):
        return base
    table = base["embed"]
    of_rows = jax.ShapeDtypeStruct((rows, table.shape[1]), table.dtype)
    ids = jax.ShapeDtypeStruct((rows,), np.dtype(np.int32))
    return base | {"embed": EmbeddingRows(ids, of_rows, table.shape[0])}


def policy_shapes(cfg: Config) -> Params:
    """Shapes of the policy in the engine: all weights, or the base with its adapters."""
    return jax.eval_shape(make_engine_reader(cfg), base_shapes(cfg), trained_shapes(cfg))


def microbatch_tokens(cfg: Config, sharing: PromptSharing | None = None) -> int:
    """Tokens of a microbatch on one device; with `sharing` of one with shared prompts."""
    if sharing is None:
        return microbatch_rows(cfg) * cfg.context // cfg.mesh.sequence
    return sharing.rows // cfg.mesh.row_shards * sharing.length // cfg.mesh.sequence


def parse_too_large(message: str, state: int, seconds: float) -> TooLarge | None:
    """Parse libtpu's out-of-memory message; None for other messages.

    It has the total, "Used 22.88G of 15.75G hbm", or the temporaries alone, to which `state` is
    added: "memory required for HLO temporaries (46.48G) exceeds available HBM (31.24G)".
    """
    size = r"([\d.]+)([KMG])"
    total = re.search(rf"Used {size} of {size} hbm", message)
    partial_size = re.search(
        rf"required for HLO (\w+) \({size}\) exceeds available HBM \({size}\)", message
    )
    if total is None and partial_size is None:
        return None
    match = total or partial_size
    assert match is not None
    figures = match.groups()[-4:]
    used, capacity = (round(float(figures[i]) * _UNITS[figures[i + 1]]) for i in (0, 2))
    state_bytes = state if total is None and match[1] == "temporaries" else 0
    return TooLarge(used + state_bytes, capacity, seconds)
