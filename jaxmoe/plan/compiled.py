# SPDX-License-Identifier: Apache-2.0
"""The step of RL, compiled for devices that are not here, and what the compiler says of it.

It is the program that train jits, of the same shapes lying the same way.
Next: jaxmoe/plan/collectives.py reads its text, jaxmoe/plan/report.py tells.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import Config
from jaxmoe.memory import plan_memory
from jaxmoe.model import make_ops
from jaxmoe.model.embedding import EmbeddingRows
from jaxmoe.model.lora import with_adapters
from jaxmoe.model.params import abstract_base, abstract_params
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import drop_unit_axes, make_mesh, make_one_device_mesh
from jaxmoe.plan.collectives import Collective, TpuKernel, collectives, tpu_kernels
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.programs import batch_shapes, rl_program, sharded_batch_shapes, warmup_optimizer
from jaxmoe.rl.state import init_run_adapters, stage_shapes
from jaxmoe.shapes import Params
from pallas_kernels.ahead_of_time import compile_on
from pallas_kernels.dispatch import Impl

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Step:
    """A compiled step; bytes are one device's."""

    arguments: int  # state and batch
    temporaries: int  # and results that do not take the place of an argument
    collectives: Counter[Collective]
    kernels: int  # calls of Pallas kernels in the program's text
    seconds: float  # of compiling
    host: int = 0  # bytes of a device's host, beside the device's own
    tpu_kernels: Counter[TpuKernel] = field(default_factory=Counter)

    @property
    def live(self) -> int:
        return self.arguments + self.temporaries


@dataclass(frozen=True)
class TooLarge:
    """The compiler found no way to place the step in the chip's memory."""

    needs: int  # bytes of one device
    there: int
    seconds: float


def mesh_on(cfg: Config, devices: Sequence[Any]) -> Mesh:
    """The run's mesh over these devices, or over the one."""
    return make_mesh(cfg.mesh, devices) or make_one_device_mesh(devices[0])


def compiled_step(cfg: Config, mesh: Mesh, impls: Mapping[str, Impl]) -> Step | TooLarge:
    """The step on `mesh_on`'s mesh. Raises whatever else the compiler refuses."""
    of_run = mesh if cfg.mesh.devices > 1 else None
    a, tx = algorithm_from_config(cfg), rl_optimizer(cfg)
    ops = sharded_ops(make_ops(cfg, impls), of_run, cfg.model, method=cfg.mesh.attention)
    state = stage_shapes(cfg, warmup_optimizer(cfg), tx, mesh)["rl"]
    given = (state, *sharded_batch_shapes(*batch_shapes(cfg, a), mesh), base_in_step(cfg))
    program = rl_program(cfg, ops, mesh, a, tx, state)
    began = time.perf_counter()
    try:
        around = drop_unit_axes(mesh) if of_run else mesh  # the mesh of every shard_map
        found = compile_on(around, program.fn, *given, **program.options)
    except jax.errors.JaxRuntimeError as error:
        mem, seconds = plan_memory(cfg), time.perf_counter() - began
        state = mem.weights + mem.optimizer + mem.reference
        if (found := too_large(str(error), state, seconds)) is None:
            raise
        return found
    seconds, sizes, text = time.perf_counter() - began, found.memory_analysis(), found.as_text()
    # a step is told how many microbatches there are
    unknown = microbatches(cfg) if cfg.optim.tokens_per_microbatch > 0 else 0
    assert sizes is not None and text is not None, "libtpu and XLA's GPU compiler tell both"
    return Step(
        sizes.argument_size_in_bytes,
        sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        collectives(text, mesh.size, unknown),
        len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu)', text)),
        seconds,
        sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes
        + sizes.host_output_size_in_bytes - sizes.host_alias_size_in_bytes,
        tpu_kernels(text, mesh.size, unknown),
    )  # fmt: skip


def base_of(cfg: Config) -> Params | None:
    """The shapes of what a run's adapters are trained beside; None where it trains all weights."""
    return abstract_base(cfg.model) if cfg.lora.ranks else None


def base_in_step(cfg: Config) -> Params | None:
    """`base_of` as the step is given it: of the embedding perhaps some rows, gathered before."""
    if (base := base_of(cfg)) is None or not (rows := cfg.lora.embedding_rows):
        return base
    table = base["embed"]
    of_rows = jax.ShapeDtypeStruct((rows, table.shape[1]), table.dtype)
    ids = jax.ShapeDtypeStruct((rows,), np.dtype(np.int32))
    return base | {"embed": EmbeddingRows(ids, of_rows, table.shape[0])}


def policy_shapes(cfg: Config) -> Params:
    """What the trainer hands to its engine: whole weights, or the base with adapters beside it."""
    if (base := base_of(cfg)) is None:
        return abstract_params(cfg.model, cfg.optim.param_dtype)
    return with_adapters(
        base, jax.eval_shape(partial(init_run_adapters, cfg), base), cfg.lora.scales
    )


def microbatches(cfg: Config) -> int:
    """Of one update, of sequences of full length."""
    rows = cfg.optim.tokens_per_microbatch // cfg.context
    mine = cfg.rollout.sequences_per_step // cfg.loss.minibatches
    return -(-mine // rows) if rows else max(1, cfg.optim.microbatches // cfg.loss.minibatches)


def too_large(said: str, state: int, seconds: float) -> TooLarge | None:
    """libtpu's: Used 22.88G of 15.75G hbm; or of temporaries alone, beside which the state lies:
    memory required for HLO temporaries (46.48G) exceeds available HBM (31.24G)."""
    size = r"([\d.]+)([KMG])"
    whole = re.search(rf"Used {size} of {size} hbm", said)
    part = re.search(rf"required for HLO (\w+) \({size}\) exceeds available HBM \({size}\)", said)
    if whole is None and part is None:
        return None
    found = whole or part
    assert found is not None
    figures = found.groups()[-4:]
    used, there = (round(float(figures[i]) * _UNITS[figures[i + 1]]) for i in (0, 2))
    beside = state if whole is None and found[1] == "temporaries" else 0
    return TooLarge(used + beside, there, seconds)
