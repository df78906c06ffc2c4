# SPDX-License-Identifier: Apache-2.0
"""Time of a TPU's kernels by libtpu's schedules of this step.

No kernel comes near the peak of the matrix units, so that bound is loose. With a flag that it reads
once, before it loads, libtpu writes the schedule of everything that it compiles. The iterations of
a kernel's loops follow from the shapes of its call, for rows of full length and balanced routing. A
kernel whose iterations are unknown counts at the peak. Next: jaxmoe/plan/roofline.py.
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

from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.config import Config
from jaxmoe.plan.chips import Chip
from jaxmoe.plan.collectives import TpuKernel
from jaxmoe.plan.compiled import microbatch_tokens
from jaxmoe.run.memory import microbatch_rows
from pallas_kernels.bench import loop_counts
from pallas_kernels.bench.schedule_tpu import FLAGS, LoopCounts, read_tpu_schedules
from pallas_kernels.grouped_matmul.cases import MatmulCase
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase

_FLAG = "LIBTPU_INIT_ARGS"


@dataclass(frozen=True)
class KernelTime:
    """Time of one device's kernels in a step, for kernels with known loop counts."""

    seconds: float  # by their schedules, without waiting for memory
    flops: float  # of matrix products in that time
    calls: int
    other_calls: int  # calls of kernels with unknown loop counts


@contextlib.contextmanager
def libtpu_dump_folder() -> Iterator[Path]:
    """A folder where libtpu, if this process has not loaded it yet, writes its schedules."""
    previous = os.environ.get(_FLAG)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[_FLAG] = f"{previous or ''} {FLAGS.format(folder)}".strip()
        try:
            yield Path(folder)
        finally:
            del os.environ[_FLAG]
            if previous is not None:
                os.environ[_FLAG] = previous


def time_kernels(
    cfg: Config,
    mesh: Mesh,
    calls: Mapping[TpuKernel, int],
    folder: Path,
    name: str,
    chip: Chip,
    sharing: PromptSharing | None = None,
) -> KernelTime:
    """Time of these calls of the step's program, on the chip `name`.

    sharing: how the step's microbatches share prompts.
    Raises: ValueError when a schedule of libtpu cannot be read.
    """
    schedules = {schedule.kernel: schedule for schedule in read_tpu_schedules(folder)}
    seconds, flops, n_known = 0.0, 0.0, 0
    for call, times in calls.items():
        with jax.set_mesh(mesh):  # sets the target chip, on which tiles depend
            counted = _count_call(cfg, call, sharing)
        if counted is None or call.name not in schedules:
            continue
        if (ms := schedules[call.name].ms(counted[0], name)) is None:
            continue
        # Clocks are known to three digits, so the time may come out below that of the peak.
        call_s = max(1e-3 * ms, counted[1] / chip.flops)
        seconds, flops, n_known = (
            seconds + times * call_s,
            flops + times * counted[1],
            n_known + times,
        )
    return KernelTime(seconds, flops, n_known, sum(calls.values()) - n_known)


def _count_call(
    cfg: Config, call: TpuKernel, sharing: PromptSharing | None = None
) -> tuple[LoopCounts, float] | None:
    """Loop counts of this kernel, and its floating-point operations; None if unknown."""
    m, mesh = cfg.model, cfg.mesh
    arrays = [sizes for dtype, sizes in call.operands if dtype == "bf16"]
    if "sink_attention" in call.name and mesh.sequence == 1:
        B, T, N = microbatch_rows(cfg), cfg.context, m.n_q_heads // mesh.tensor
        windows = {kind.window for kind in m.plan.kinds if kind.window}
        if "_window" in call.name and len(windows) > 1:
            return None
        window = windows.pop() if "_window" in call.name else 0
        case = AttentionCase("", B, T, T, N, m.n_kv_heads // mesh.tensor, m.head_dim, window)
        low, high = 0, T
        if part := re.search(r"_keys(\d+)", call.name):
            low = int(part[1])
            high = min(
                (n for n in _part_starts(loop_counts.attention_counts(case)) if n > low), default=T
            )
        backward = "_backward" in call.name
        products = (
            # A forward has two products and a backward five, of two operations for each
            # multiply-add.
            (10 if backward else 4) * B * N * m.head_dim * _visible_pairs(T, window, low, high)
        )
        return _match_counts(call, loop_counts.attention_counts(case), products)
    matrix = [sizes for sizes in arrays if len(sizes) == 3]
    rows = [sizes for sizes in arrays if len(sizes) == 2]
    if "grouped_" in call.name and rows:
        M, (n_local, routed_rows) = rows[0][0], _balanced_rows(cfg, sharing)
        if "drhs" in call.name and len(rows) > 1:
            D, F = rows[0][1], rows[1][1]
        elif matrix and matrix[0][0] == n_local:
            _, D, F = matrix[0]
        else:
            return None
        if routed_rows > M:  # a part of the tokens
            return None
        sizes = tuple(np.diff(np.arange(n_local + 1) * routed_rows // n_local).tolist())
        op = "grouped_swiglu" if "swiglu" in call.name else "grouped_matmul"
        return _match_counts(
            call,
            loop_counts.count_loops(op, MatmulCase("", M, D, F, sizes)),
            2 * routed_rows * D * F,
        )
    if "token_logprobs" in call.name and len(rows) == 2:
        (M, D), (_, V) = rows
        return _match_counts(
            call,
            loop_counts.count_loops("token_logprobs", LogprobsCase("", M, D, V, V)),
            2 * M * D * V,
        )
    return None


def _match_counts(
    call: TpuKernel, counts_by_name: Mapping[str, LoopCounts], flops: int
) -> tuple[LoopCounts, float] | None:
    for name, counts in counts_by_name.items():
        # Compilers append numbers to the name of an instruction.
        if re.search(rf"(^|_){name}_*([._]\d+)*(\.refs_\d+_)?$", call.name):
            return counts, float(flops)
    return None


def _part_starts(counts_by_name: Mapping[str, LoopCounts]) -> list[int]:
    """The first keys of the parts into which a backward pass splits them."""
    return [int(match[1]) for name in counts_by_name if (match := re.search(r"_keys(\d+)", name))]


def _visible_pairs(T: int, window: int, low: int, high: int) -> int:
    """Visible (query, key) pairs of a row of T tokens, with keys low … high − 1."""
    query = np.arange(T, dtype=np.int64)
    first = np.maximum(low, query + 1 - window if window else 0)
    return int(np.maximum(np.minimum(query + 1, high) - first, 0).sum())


def _balanced_rows(cfg: Config, sharing: PromptSharing | None) -> tuple[int, int]:
    """A device's experts, and the rows routed to them when routing is balanced."""
    m, mesh = cfg.model, cfg.mesh
    tokens = microbatch_tokens(cfg, sharing)
    return m.n_experts // (mesh.expert * mesh.tensor), tokens * m.experts_per_token // mesh.tensor
