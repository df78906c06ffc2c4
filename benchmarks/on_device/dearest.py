# SPDX-License-Identifier: Apache-2.0
"""The dearest operations of a device by JAX's profiler: name, share of the device's time, calls."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def trace_dearest(run: Callable[[], None], count: int = 30) -> list[dict[str, Any]]:
    """Run once under the profiler and sum the time of the device's kernels by name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return sum_kernels(Path(folder), count)


def sum_kernels(folder: Path, count: int) -> list[dict[str, Any]]:
    """The dearest kernels of the traces in a folder; [] if there is no device in them."""
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if "/device:" not in plane.name.lower():
                continue
            for line in plane.lines:
                if "stream" not in line.name.lower():
                    continue  # others repeat the same time by module or by step
                for event in line.events:
                    name = shorten(event.name)
                    seconds[name] += 1e-9 * event.duration_ns
                    calls[name] += 1
    total = sum(seconds.values())
    return [
        {"name": name, "seconds": round(s, 5), "share": round(s / total, 4), "calls": calls[name]}
        for name, s in seconds.most_common(count)
    ]


def shorten(name: str) -> str:
    """A kernel's name without the numbers that tell apart its copies."""
    return re.sub(r"([._]\d+)+$", "", name)[:120]
