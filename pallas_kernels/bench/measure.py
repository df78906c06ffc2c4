# SPDX-License-Identifier: Apache-2.0
"""Runs, times and anchors: the two sides, and a matmul and a copy in the same process."""

import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench.ops import Op

Run = Callable[[], Any]  # starts the work and returns its results, possibly before they are ready
# A timing repeats the work for at least so long, so that the clock's resolution and the dispatch
# of a call do not count.
MIN_TIMED_S = 0.02
# Options of XLA's GPU compiler for programs whose speed does not matter: its matrix products are
# not tuned, which takes minutes for a reference.
UNTUNED = {"xla_gpu_autotune_level": 0}


class Anchors(NamedTuple):
    """The best throughput of this device, measured in this process."""

    matmul_tflops: float
    copy_gbs: float


def measure_anchors(platform: str, dtype: Any) -> Anchors:
    """Time a square matmul in `dtype` and an elementwise copy of float32."""
    width, elements = (1536, 2**25) if platform == "cpu" else (8192, 2**29)
    a, b = (jax.random.normal(jax.random.key(i), (width, width)).astype(dtype) for i in (0, 1))
    x = jnp.zeros(elements, jnp.float32)
    matmul, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1.0)
    matmul_s = statistics.median(time_run(lambda: matmul(a, b)) for _ in range(10))
    copy_s = statistics.median(time_run(lambda: copy(x)) for _ in range(10))
    # A copy reads and writes four bytes of each element.
    return Anchors(2e-12 * width**3 / matmul_s, 8e-9 * elements / copy_s)


def time_run(run: Run) -> float:
    """Wall time of one run: the mean over at least MIN_TIMED_S, after one warm-up run."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    count = max(1, round(MIN_TIMED_S / max(time.perf_counter() - start, 1e-7)))
    start = time.perf_counter()
    for _ in range(count):
        results = run()
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / count


class JittedOp:
    """An implementation of this package on one case, compiled once.

    `is_timed` False is for results alone: on a GPU XLA then tunes none of its programs.
    """

    def __init__(self, op: Op, case: Any, impl: str, is_timed: bool = True) -> None:
        call, n = op.call(case, impl), op.differentiated
        is_untuned = not is_timed and jax.default_backend() == "gpu"
        jit = partial(jax.jit, compiler_options=UNTUNED) if is_untuned else jax.jit
        self.forward = jit(call)
        # The function that jax.vjp returns is a pytree of residuals: it can leave one program and
        # enter another, so the backward pass is timed alone.
        self.pull = jit(lambda *x: jax.vjp(lambda *d: call(*d, *x[n:]), *x[:n]))
        self.backward = jit(lambda pull, ct: pull(ct))

    def compile(self, inputs: tuple[Any, ...], cotangents: Any) -> None:
        """Compile every pass for arguments of these shapes, so that `passes` compiles nothing."""
        self.forward.lower(*inputs).compile()
        if cotangents is not None:
            self.pull.lower(*inputs).compile()
            _, pull = jax.eval_shape(self.pull, *inputs)
            self.backward.lower(pull, cotangents).compile()

    def passes(self, inputs: tuple[Any, ...], cotangents: Any) -> dict[str, Run]:
        """The passes that can be timed with these inputs."""
        runs: dict[str, Run] = {"forward": lambda: self.forward(*inputs)}
        if cotangents is not None:
            _, pull = self.pull(*inputs)
            runs["backward"] = lambda: self.backward(pull, cotangents)
        return runs

    def temp_bytes(self, inputs: tuple[Any, ...], cotangents: Any) -> dict[str, int | None]:
        """Device memory of each pass in addition to arguments and results; None if unknown."""

        def measure_temp(fn: Any, *args: Any) -> int | None:
            analysis = fn.lower(*args).compile().memory_analysis()
            return None if analysis is None else analysis.temp_size_in_bytes

        sizes = {"forward": measure_temp(self.forward, *inputs)}
        if cotangents is not None:
            _, pull = self.pull(*inputs)
            sizes["backward"] = measure_temp(self.backward, pull, cotangents)
        return sizes


def generate_inputs(op: Op, case: Any, dtype: Any, seed: int) -> tuple[Any, ...]:
    """The inputs, made by one program, so that the random bits of large arrays need no memory."""
    return jax.jit(partial(op.inputs, case, dtype))(seed)


class Peer:
    """Another package's implementation: `function(case, inputs, cotangents)` returns {pass: run}.

    Its runs wait for their results and return them in our order, with None for results that it does
    not have. It raises NotImplementedError or ImportError for cases that it cannot run.
    """

    def __init__(self, case: Any, name: str) -> None:
        module, _, function = name.partition(":")
        self.case, self.function = case, getattr(importlib.import_module(module), function)

    def passes(self, inputs: tuple[Any, ...], cotangents: Any) -> dict[str, Run]:
        """The passes that the peer supports."""
        return self.function(self.case, inputs, cotangents)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def load_side(op: Op, case: Any, name: str) -> JittedOp | Peer:
    """A side of the comparison by its name: an implementation, or module:function of a peer."""
    return Peer(case, name) if ":" in name else JittedOp(op, case, name)
