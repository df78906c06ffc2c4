# SPDX-License-Identifier: Apache-2.0
"""How time and memory of attention grow with the length: full layers ∝ T², windowed ∝ T."""

import statistics
from typing import Any

import numpy as np

from pallas_kernels.bench.measure import Ours, seconds
from pallas_kernels.bench.ops import OPS, Op, cotangents

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LENGTHS_ON_A_CPU = LENGTHS[:4]


def growth(op: Op, impl: str, dtype: Any, platform: str) -> str:
    """A table of lengths, and the exponents fitted to their upper half."""
    if op is not OPS["sink_attention"]:
        return "--growth is of sink_attention: the other operations have no length in them."
    lengths = LENGTHS_ON_A_CPU if platform == "cpu" else LENGTHS
    heads = (16, 2) if platform == "cpu" else (64, 8)
    lines = []
    for name, window in (("full", 0), ("window 128", 128)):
        times: dict[str, list[float]] = {}
        memory: dict[str, list[float]] = {}
        for T in lengths:
            case = op.cases.Case(f"{name}_{T}", 1, T, T, *heads, 64, window)
            inputs = op.inputs(case, dtype, 0)
            ct, ours = cotangents(op, case, inputs, 0), Ours(op, case, impl)
            for part, run in ours.passes(inputs, ct).items():
                times.setdefault(part, []).append(statistics.median(seconds(run) for _ in range(5)))
            for part, bytes_ in ours.temp_bytes(inputs, ct).items():
                memory.setdefault(part, []).append(float(max(bytes_ or 0, 1)))
        for part, found in times.items():
            row = "  ".join(f"{T}: {1e3 * t:.2f} ms" for T, t in zip(lengths, found, strict=True))
            lines.append(f"{name} {part}: {row}")
            lines.append(f"  time ∝ T^{exponent(lengths, found):.2f}, "
                         f"memory ∝ T^{exponent(lengths, memory[part]):.2f}")  # fmt: skip
    return "\n".join(lines)


def exponent(lengths: tuple[int, ...], values: list[float]) -> float:
    """The slope of log value over log length, fitted to the longer half."""
    half = len(lengths) // 2
    return float(np.polyfit(np.log(lengths[half:]), np.log(values[half:]), 1)[0])
