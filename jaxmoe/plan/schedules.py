# SPDX-License-Identifier: Apache-2.0
"""How long a TPU's kernels take by their schedules: those that libtpu made of them in this step.

A kernel at the peak of the matrix units is a bound that none comes near. libtpu, asked by a flag
that it reads once, before it loads, leaves the schedule of all that it compiles; how often the
loops of a kernel turn follows from the shapes that it is called with, in rows of full length and
with experts that are asked alike. A kernel whose turns are not known counts at the peak.
Next: jaxmoe/plan/roofline.py.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import Config
from jaxmoe.memory import microbatch_rows
from jaxmoe.plan.chips import Chip
from jaxmoe.plan.collectives import TpuKernel
from pallas_kernels.bench import turns
from pallas_kernels.bench.schedule_tpu import FLAGS, Turns, read
from pallas_kernels.grouped_matmul.cases import MatmulCase
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase

_FLAG = "LIBTPU_INIT_ARGS"


@dataclass(frozen=True)
class Kernels:
    """Of one device in a step; those whose turns are known."""

    seconds: float  # by their schedules, without waiting for memory
    flops: float  # of matrix products in that time
    calls: int
    others: int  # calls of kernels whose turns are not known


@contextlib.contextmanager
def left_by_libtpu() -> Iterator[Path]:
    """A folder where libtpu, if this process has not loaded it yet, leaves its schedules."""
    before = os.environ.get(_FLAG)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[_FLAG] = f"{before or ''} {FLAGS.format(folder)}".strip()
        try:
            yield Path(folder)
        finally:
            del os.environ[_FLAG]
            if before is not None:
                os.environ[_FLAG] = before


def scheduled(
    cfg: Config, mesh: Mesh, calls: Mapping[TpuKernel, int], folder: Path, name: str, chip: Chip
) -> Kernels:
    """Of these calls of the step's program, on the chip of that name.

    Raises ValueError where libtpu left a schedule that cannot be read.
    """
    found = {one.kernel: one for one in read(folder)}
    seconds, flops, known = 0.0, 0.0, 0
    for call, times in calls.items():
        with jax.set_mesh(mesh):  # names the chip, whose tiles the turns are of
            counted = _turns(cfg, call)
        if counted is None or call.name not in found:
            continue
        if (ms := found[call.name].ms(counted[0], name)) is None:
            continue
        # clocks are stated to three digits, and no unit multiplies faster than the peak
        least = max(1e-3 * ms, counted[1] / chip.flops)
        seconds, flops, known = (
            seconds + times * least, flops + times * counted[1], known + times
        )  # fmt: skip
    return Kernels(seconds, flops, known, sum(calls.values()) - known)


def _turns(cfg: Config, call: TpuKernel) -> tuple[Turns, float] | None:
    """Turns of this kernel's loops, and its floating-point operations; None where not known."""
    m, mesh = cfg.model, cfg.mesh
    arrays = [sizes for dtype, sizes in call.operands if dtype == "bf16"]
    if "sink_attention" in call.name and mesh.sequence == 1:
        B, T, N = microbatch_rows(cfg), cfg.context, m.n_q_heads // mesh.tensor
        window = m.sliding_window if "_window" in call.name else 0
        case = AttentionCase("", B, T, T, N, m.n_kv_heads // mesh.tensor, m.head_dim, window)
        low, high = 0, T
        if part := re.search(r"_keys(\d+)", call.name):
            low = int(part[1])
            high = min((n for n in _starts(turns.attention(case)) if n > low), default=T)
        backward = "_backward" in call.name
        products = (10 if backward else 4) * B * N * m.head_dim * _pairs(T, window, low, high)
        return _of(call, turns.attention(case), products)
    matrix = [sizes for sizes in arrays if len(sizes) == 3]
    rows = [sizes for sizes in arrays if len(sizes) == 2]
    if "grouped_" in call.name and rows:
        M, (n_local, asked) = rows[0][0], _balanced(cfg)
        if "drhs" in call.name and len(rows) > 1:
            D, F = rows[0][1], rows[1][1]
        elif matrix and matrix[0][0] == n_local:
            _, D, F = matrix[0]
        else:
            return None
        if asked > M:  # a part of the tokens
            return None
        sizes = tuple(np.diff(np.arange(n_local + 1) * asked // n_local).tolist())
        op = "grouped_swiglu" if "swiglu" in call.name else "grouped_matmul"
        return _of(call, turns.of(op, MatmulCase("", M, D, F, sizes)), 2 * asked * D * F)
    if "token_logprobs" in call.name and len(rows) == 2:
        (M, D), (_, V) = rows
        return _of(call, turns.of("token_logprobs", LogprobsCase("", M, D, V, V)), 2 * M * D * V)
    return None


def _of(call: TpuKernel, known: Mapping[str, Turns], flops: int) -> tuple[Turns, float] | None:
    for name, found in known.items():
        if re.search(rf"(^|_){name}_*([._]\d+)*(\.refs_\d+_)?$", call.name):
            return found, float(flops)
    return None


def _starts(known: Mapping[str, Turns]) -> list[int]:
    """The first keys of the parts that a backward pass takes them in."""
    return [int(found[1]) for name in known if (found := re.search(r"_keys(\d+)", name))]


def _pairs(T: int, window: int, low: int, high: int) -> int:
    """Of a row's T queries those with a visible key from low up to high."""
    at = np.arange(T, dtype=np.int64)
    first = np.maximum(low, at + 1 - window if window else 0)
    return int(np.maximum(np.minimum(at + 1, high) - first, 0).sum())


def _balanced(cfg: Config) -> tuple[int, int]:
    """A device's experts, and the rows that ask them where all are asked alike."""
    m, mesh = cfg.model, cfg.mesh
    tokens = microbatch_rows(cfg) * cfg.context // mesh.sequence
    return m.n_experts // (mesh.expert * mesh.tensor), tokens * m.experts_per_token // mesh.tensor
