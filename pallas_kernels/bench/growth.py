# SPDX-License-Identifier: Apache-2.0
"""How time and memory of attention grow with the length: full layers ∝ T², windowed ∝ T."""

import statistics
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.measure import Ours, first_line, seconds
from pallas_kernels.bench.ops import OPS, Op, cotangents

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LENGTHS_ON_A_CPU = LENGTHS[:4]
TOO_BIG = ("resource_exhausted", "out of memory")  # as XLA says it


def growth(impl: str, dtype: Any, platform: str) -> str:
    """A table of lengths, and the exponents fitted to the upper half of those that fit."""
    op = OPS["sink_attention"]
    lengths = LENGTHS_ON_A_CPU if platform == "cpu" else LENGTHS
    heads = (16, 2) if platform == "cpu" else (64, 8)
    lines = []
    for name, window in (("full", 0), ("window 128", 128)):
        cases = [
            op.cases.AttentionCase(f"{name}_{T}", 1, T, T, *heads, 64, window) for T in lengths
        ]
        for part in ("forward", "backward"):
            found = {case.T: once(op, case, part, impl, dtype) for case in cases}
            row = "  ".join(
                f"{T}: {x}" if isinstance(x, str) else f"{T}: {1e3 * x[0]:.2f} ms"
                for T, x in found.items()
            )
            ran = {T: x for T, x in found.items() if not isinstance(x, str)}
            times = power({T: x[0] for T, x in ran.items()}, "time")
            memory = power({T: x[1] for T, x in ran.items()}, "memory")
            lines += [f"{name} {part}: {row}", f"  {times}, {memory}"]
    return "\n".join(lines)


def once(op: Op, case: Any, part: str, impl: str, dtype: Any) -> tuple[float, int | None] | str:
    """Seconds and bytes of one pass at one length; the word for it where memory does not hold it.

    Raises: any other error of the implementation.
    """
    try:
        inputs, ours = op.inputs(case, dtype, 0), Ours(op, case, impl)
        ct = cotangents(op, case, inputs, 0) if part == "backward" else None
        run = ours.passes(inputs, ct)[part]
        median = statistics.median(seconds(run) for _ in range(5))
        return median, ours.temp_bytes(inputs, ct)[part]
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        said = str(error).lower()  # on-chip memory is another matter, and does not come with length
        if isinstance(error, MemoryError) or any(x in said for x in TOO_BIG) and "vmem" not in said:
            return "out of memory"
        raise RuntimeError(f"{case.name} {part}: {first_line(error)}") from error


def power(values: dict[int, Any], what: str) -> str:
    """`what` as a power of the length, or why it is none."""
    if any(x is None for x in values.values()):
        return f"{what}: not known"
    if len(values) < 2:
        return f"{what}: too few lengths ran for an exponent"
    if not all(values.values()):
        return f"{what}: none at some lengths"
    return f"{what} ∝ T^{exponent(tuple(values), [float(x) for x in values.values()]):.2f}"


def exponent(lengths: tuple[int, ...], values: list[float]) -> float:
    """The slope of log value over log length, fitted to the longer half, two at least."""
    half = min(len(lengths) // 2, len(lengths) - 2)
    return float(np.polyfit(np.log(lengths[half:]), np.log(values[half:]), 1)[0])
