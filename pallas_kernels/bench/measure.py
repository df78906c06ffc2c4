# SPDX-License-Identifier: Apache-2.0
"""Runs, times and anchors: two sides in turn, a matmul and a copy in the same process."""

import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench.ops import Op

Run = Callable[[], Any]  # starts the work and returns its results, which may not be there yet
LEAST_S = 0.02  # a timing holds so much work at least, or the clock and the dispatch show


class Anchors(NamedTuple):
    """What this device does at best, measured here and now."""

    matmul_tflops: float
    copy_gbs: float


def anchors(platform: str, dtype: Any) -> Anchors:
    """A square matmul in `dtype` and an elementwise copy of float32 in this process."""
    side, elements = (1536, 2**25) if platform == "cpu" else (8192, 2**29)
    a, b = (jax.random.normal(jax.random.key(i), (side, side)).astype(dtype) for i in (0, 1))
    x = jnp.zeros(elements, jnp.float32)
    matmul, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1.0)
    matmul_s = statistics.median(seconds(lambda: matmul(a, b)) for _ in range(10))
    copy_s = statistics.median(seconds(lambda: copy(x)) for _ in range(10))
    return Anchors(2e-12 * side**3 / matmul_s, 8e-9 * elements / copy_s)


def seconds(run: Run) -> float:
    """Wall time of one run, over as many as make LEAST_S; the first, uncounted, warms up."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    count = max(1, round(LEAST_S / max(time.perf_counter() - start, 1e-7)))
    start = time.perf_counter()
    for _ in range(count):
        results = run()
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / count


class Ours:
    """One of our implementations on one case, compiled once."""

    def __init__(self, op: Op, case: Any, impl: str) -> None:
        call, n = op.call(case, impl), op.differentiated
        self.forward = jax.jit(call)
        self.pull = jax.jit(lambda *x: jax.vjp(lambda *d: call(*d, *x[n:]), *x[:n]))
        self.back = jax.jit(lambda pull, ct: pull(ct))

    def passes(self, inputs: tuple[Any, ...], cotangents: Any) -> dict[str, Run]:
        """What can be timed with these inputs."""
        runs: dict[str, Run] = {"forward": lambda: self.forward(*inputs)}
        if cotangents is not None:
            _, pull = self.pull(*inputs)
            runs["backward"] = lambda: self.back(pull, cotangents)
        return runs

    def temp_bytes(self, inputs: tuple[Any, ...], cotangents: Any) -> dict[str, int | None]:
        """Device memory of a pass beside its arguments and results; None where not known."""

        def temp(fn: Any, *args: Any) -> int | None:
            analysis = fn.lower(*args).compile().memory_analysis()
            return None if analysis is None else analysis.temp_size_in_bytes

        found = {"forward": temp(self.forward, *inputs)}
        if cotangents is not None:
            _, pull = self.pull(*inputs)
            found["backward"] = temp(self.back, pull, cotangents)
        return found


def drawn(op: Op, case: Any, dtype: Any, seed: int) -> tuple[Any, ...]:
    """The inputs, made by one program: a large array's random bits are never held beside it."""
    return jax.jit(partial(op.inputs, case, dtype))(seed)


class Peer:
    """Somebody else's: `function(case, inputs, cotangents)` returns {pass: run}.

    Its runs wait for their results and return them in our order, None for what it lacks. What it
    cannot do it refuses by NotImplementedError or ImportError.
    """

    def __init__(self, case: Any, name: str) -> None:
        module, _, function = name.partition(":")
        self.case, self.function = case, getattr(importlib.import_module(module), function)

    def passes(self, inputs: tuple[Any, ...], cotangents: Any) -> dict[str, Run]:
        """What the peer can do of it."""
        return self.function(self.case, inputs, cotangents)


def first_line(error: BaseException) -> str:
    """What an error says first; its name where it says nothing."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return said[0] if said else type(error).__name__


def side(op: Op, case: Any, name: str) -> Ours | Peer:
    """An implementation's name, or module:function of a peer."""
    return Peer(case, name) if ":" in name else Ours(op, case, name)
