# SPDX-License-Identifier: Apache-2.0
"""The speed of a policy's matrix product against a reference, measured and checked outside.

Each repetition starts an interpreter in which nothing ran before and draws new matrices, so nothing
is left of an earlier one and nothing can be known in advance. The trainer reads the CPU time of
the sandbox's process from the kernel: no clock inside is asked, waiting gains nothing, and all
threads count.
Next: kernel_scorer.py is the reward function.
"""

import enum
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kernel_rules import BUILTIN_NAMES

from jaxmoe.sandbox.inside.plain_data import PlainForm
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.process import CallResult, CallStatus, SandboxError

REFERENCE = """
def matmul(A, B):
    n, k, m = len(A), len(B), len(B[0])
    C = [[0] * m for _ in range(n)]
    for i in range(n):
        for j in range(m):
            for t in range(k):
                C[i][j] += A[i][t] * B[t][j]
    return C
"""
_EXTREME_SHARE = 0.9  # of the numbers of a planted row
_REFERENCE_LIMIT_S = 60.0  # of a call; a busy machine takes longer, and a kernel cannot cause it
# Texts cross the border, because their JSON is read and written in C: about 1 ms, where plain data
# would take as long as the product. What it takes is part of both times.
_INSIDE = """
import builtins, json

class NotPlainData(Exception):
    pass

_space = {}

def load_kernel(code, names):
    _space["__builtins__"] = {name: getattr(builtins, name) for name in names}
    _space["__name__"] = "kernel"
    exec(compile(code, "<python>", "exec"), _space)

def multiply(text):
    A, B = json.loads(text)
    C = _space["matmul"](A, B)
    try:
        return json.dumps(C)
    except (TypeError, ValueError, RecursionError):
        raise NotPlainData from None
"""


class KernelStatus(enum.StrEnum):
    """The outcome of measuring a kernel."""

    CORRECT = "correct"
    INCORRECT = "incorrect"  # anything but the product as lists of integers
    RAISED = "raised"
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # it ended its interpreter
    FORGED = "forged"  # it wrote to the interpreter's pipe
    UNFINISHED_TASKS = "unfinished_tasks"  # it left threads behind
    NOT_PLAIN = "not_plain"  # it returned something else than numbers, texts and lists


_FAILED = {
    CallStatus.TIMEOUT: KernelStatus.TIMEOUT,
    CallStatus.CRASHED: KernelStatus.CRASHED,
    CallStatus.FORGED: KernelStatus.FORGED,
    CallStatus.UNFINISHED_TASKS: KernelStatus.UNFINISHED_TASKS,
}


@dataclass(frozen=True)
class Matrices:
    """Two factors as JSON text, and their product as the text that a right kernel returns."""

    factors: str
    product: str


@dataclass(frozen=True)
class KernelTiming:
    """One repetition: how it ended, a line about it, and CPU seconds if the call returned."""

    status: KernelStatus
    detail: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True)
class KernelMeasurement:
    """All repetitions of a kernel; the speedup is above 0 if each of them was right."""

    status: KernelStatus
    detail: str = ""
    speedup: float = 0.0  # median over repetitions of the reference's time / the kernel's
    cpu_s: float = 0.0  # median of the kernel's time


def draw_matrices(sizes: tuple[int, int, int], bound: int, rng: np.random.Generator) -> Matrices:
    """Random integers from -bound to bound, n × k and k × m, and their exact product.

    Two rows of the first and a column of the second hold mostly extremes, of signs that add up, so
    that a kernel that relies on sums being small, as random ones are, is wrong. One that looks for
    these rows, and treats them apart, is not seen.
    The product is computed in int64: k · bound² must be below 2⁶³.
    """
    n, k, m = sizes
    a_nk = rng.integers(-bound, bound, (n, k), np.int64, endpoint=True)
    b_km = rng.integers(-bound, bound, (k, m), np.int64, endpoint=True)
    low, high = rng.choice(n, 2, replace=False)
    extreme_k = bound * rng.choice([-1, 1], k)
    for line_k, sign in ((a_nk[low], -1), (a_nk[high], 1), (b_km[:, rng.integers(m)], 1)):
        line_k[:] = np.where(rng.random(k) < _EXTREME_SHARE, sign * extreme_k, line_k)
    return Matrices(json.dumps([a_nk.tolist(), b_km.tolist()]), json.dumps((a_nk @ b_km).tolist()))


def measure_kernel(
    pool: SandboxPool,
    code: str,
    sizes: tuple[int, int, int],
    bound: int,
    *,
    repetitions: int = 5,
    timeout_s: float = 10.0,
    builtin_names: Sequence[str] = BUILTIN_NAMES,
) -> KernelMeasurement:
    """Measure the function `matmul` of a program against REFERENCE, alternated, on new matrices.

    The time of a repetition is the CPU time from reading the code to the result as text, in an
    interpreter of its own; the same for the reference. The median of the paired ratios ignores
    single disturbances, and what slows the machine slows both of a pair.
    timeout_s: of one call of the kernel, in seconds that pass.
    builtin_names: the builtins that the program has.
    Raises: SandboxError if no sandbox starts, or the reference does not end.
    """
    rng = np.random.default_rng()  # from the system's entropy: not to be guessed
    kernel_s, reference_s = [], []
    for _ in range(repetitions):
        matrices = draw_matrices(sizes, bound, rng)
        timing = time_once(pool, code, matrices, timeout_s, builtin_names)
        if timing.status is not KernelStatus.CORRECT:
            return KernelMeasurement(timing.status, timing.detail)
        reference = time_once(pool, REFERENCE, matrices, _REFERENCE_LIMIT_S)
        if reference.status is not KernelStatus.CORRECT:
            raise SandboxError(
                f"the reference kernel failed: {reference.status} {reference.detail}"
            )
        kernel_s.append(timing.cpu_s)
        reference_s.append(reference.cpu_s)
    ratios = [r / k for r, k in zip(reference_s, kernel_s, strict=True)]
    return KernelMeasurement(
        KernelStatus.CORRECT, "", statistics.median(ratios), statistics.median(kernel_s)
    )


def time_once(
    pool: SandboxPool,
    code: str,
    matrices: Matrices,
    timeout_s: float,
    builtin_names: Sequence[str] = BUILTIN_NAMES,
) -> KernelTiming:
    """Load a program into a fresh interpreter and call its `matmul` once. Raises SandboxError."""
    sandbox = pool.acquire()
    try:
        ready = sandbox.run(_INSIDE, _REFERENCE_LIMIT_S)
        if ready.status is not CallStatus.OK:
            raise SandboxError(f"a sandbox did not load the kernel task: {ready.status}")
        start_s = sandbox.read_cpu_s()
        result = sandbox.call("load_kernel", [code, list(builtin_names)], timeout_s)
        if result.status is CallStatus.OK:
            result = sandbox.call("multiply", [matrices.factors], timeout_s)
        if result.status is not CallStatus.OK:
            return _describe_failure(result)
        try:
            cpu_s = sandbox.read_cpu_s() - start_s
        except OSError:  # it ended after its reply
            return KernelTiming(KernelStatus.CRASHED)
    finally:
        pool.release(sandbox)
    # As texts: nothing of the policy's is parsed or compared by methods of its own.
    is_correct = result.value == PlainForm(matrices.product)
    return KernelTiming(KernelStatus.CORRECT if is_correct else KernelStatus.INCORRECT, "", cpu_s)


def _describe_failure(result: CallResult) -> KernelTiming:
    if result.status in _FAILED:
        return KernelTiming(_FAILED[result.status], result.error)
    is_plain = result.error != "NotPlainData"
    return KernelTiming(KernelStatus.RAISED if is_plain else KernelStatus.NOT_PLAIN, result.error)
