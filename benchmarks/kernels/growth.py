# SPDX-License-Identifier: Apache-2.0
"""How time and memory of attention grow with the length: full layers ∝ T², windowed ∝ T."""

import statistics
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.measure import JittedOp, first_line, time_run
from pallas_kernels.bench.ops import OPS, Op, make_cotangents

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LENGTHS_ON_A_CPU = LENGTHS[:4]
TOO_BIG = ("resource_exhausted", "out of memory")  # in XLA's messages


def format_growth(impl: str, dtype: Any, platform: str) -> str:
    """Table of times by length, with exponents fitted to the upper half of the lengths that ran."""
    op = OPS["sink_attention"]
    lengths = LENGTHS_ON_A_CPU if platform == "cpu" else LENGTHS
    heads = (16, 2) if platform == "cpu" else (64, 8)
    lines = []
    for name, window in (("full", 0), ("window 128", 128)):
        cases = [
            op.cases.AttentionCase(f"{name}_{T}", 1, T, T, *heads, 64, window) for T in lengths
        ]
        for part in ("forward", "backward"):
            measured = {case.T: measure_length(op, case, part, impl, dtype) for case in cases}
            row = "  ".join(
                f"{T}: {x}" if isinstance(x, str) else f"{T}: {1e3 * x[0]:.2f} ms"
                for T, x in measured.items()
            )
            fitting = {T: x for T, x in measured.items() if not isinstance(x, str)}
            times = format_power({T: x[0] for T, x in fitting.items()}, "time")
            memory = format_power({T: x[1] for T, x in fitting.items()}, "memory")
            lines += [f"{name} {part}: {row}", f"  {times}, {memory}"]
    return "\n".join(lines)


def measure_length(
    op: Op, case: Any, part: str, impl: str, dtype: Any
) -> tuple[float, int | None] | str:
    """Seconds and bytes of one pass at one length, or "out of memory".

    Raises: RuntimeError for any other error of the implementation.
    """
    try:
        inputs, jitted = op.inputs(case, dtype, 0), JittedOp(op, case, impl)
        ct = make_cotangents(op, case, inputs, 0) if part == "backward" else None
        run = jitted.passes(inputs, ct)[part]
        median = statistics.median(time_run(run) for _ in range(5))
        return median, jitted.temp_bytes(inputs, ct)[part]
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = str(error).lower()  # VMEM errors do not depend on the length, so they are errors
        if isinstance(error, MemoryError) or any(x in text for x in TOO_BIG) and "vmem" not in text:
            return "out of memory"
        raise RuntimeError(f"{case.name} {part}: {first_line(error)}") from error


def format_power(values: dict[int, Any], quantity: str) -> str:
    """`quantity` as a power of the length, or the reason why there is no exponent."""
    if any(x is None for x in values.values()):
        return f"{quantity}: unknown"
    if len(values) < 2:
        return f"{quantity}: too few lengths ran for an exponent"
    if not all(values.values()):
        return f"{quantity}: zero at some lengths"
    return f"{quantity} ∝ T^{fit_exponent(tuple(values), [float(x) for x in values.values()]):.2f}"


def fit_exponent(lengths: tuple[int, ...], values: list[float]) -> float:
    """The slope of log value over log length, fitted to the longer half, at least two points."""
    half = min(len(lengths) // 2, len(lengths) - 2)
    return float(np.polyfit(np.log(lengths[half:]), np.log(values[half:]), 1)[0])
