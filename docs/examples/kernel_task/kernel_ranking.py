# SPDX-License-Identifier: Apache-2.0
"""Are honest kernels ranked by their speed?

    python docs/examples/kernel_task/kernel_ranking.py [--busy N]


Each repeat measures four kernels as the reward does, each against the reference, while N processes
beside keep the machine busy. A repeat is right if the four are in the order of their speed.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from kernel_rows import BOUND
from kernel_timing import (
    REFERENCE,
    KernelStatus,
    draw_matrices,
    measure_kernel,
    time_once,
)

from jaxmoe.graders.code_scorer import open_pool_of_run
from jaxmoe.sandbox.pool import SandboxPool

# From slow to fast.
KERNELS = {
    "triple loop": REFERENCE,
    "columns first": """
def matmul(A, B):
    columns = [list(column) for column in zip(*B)]
    C = []
    for row in A:
        out = []
        for column in columns:
            total = 0
            for x, y in zip(row, column):
                total += x * y
            out.append(total)
        C.append(out)
    return C
""",
    # Three columns of B are one, whose integers have the digits of three.
    "three columns in one": """
def matmul(A, B):
    k, m = len(B), len(B[0])
    largest = max(max(map(abs, row)) for row in A) * max(max(map(abs, row)) for row in B)
    bits = (2 * k * largest + 1).bit_length() + 1
    half, mask = 1 << bits - 1, (1 << bits) - 1
    halves = half | half << bits | half << 2 * bits
    padded = [row + [0] * (-m % 3) for row in B]
    columns = []
    for j in range(0, m, 3):
        columns.append([
            row[j] + (row[j + 1] << bits) + (row[j + 2] << 2 * bits) for row in padded
        ])
    C = []
    for row in A:
        out = []
        for column in columns:
            total = halves
            for x, y in zip(row, column):
                total += x * y
            out.append((total & mask) - half)
            out.append((total >> bits & mask) - half)
            out.append((total >> 2 * bits) - half)
        C.append(out[:m])
    return C
""",
    # Kronecker substitution: a row of B is one large integer.
    "rows in integers": """
def matmul(A, B):
    k, m = len(B), len(B[0])
    largest = max(max(map(abs, row)) for row in A) * max(max(map(abs, row)) for row in B)
    width = (2 * k * largest + 1).bit_length() // 8 + 1
    half = 1 << (8 * width - 1)
    halves = int.from_bytes(half.to_bytes(width, "little") * m, "little")
    packed = [sum([x << 8 * width * j for j, x in enumerate(row)]) for row in B]
    C = []
    for row in A:
        total = halves
        for x, y in zip(row, packed):
            total += x * y
        digits = total.to_bytes(width * m + 1, "little")
        C.append([
            int.from_bytes(digits[i : i + width], "little") - half
            for i in range(0, width * m, width)
        ])
    return C
""",
}
SIZES = (72, 80, 88)


def keep_busy() -> None:
    x = 0
    while True:
        x += 1


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that use a processor each."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=keep_busy, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def rank_once(
    pool: SandboxPool, sizes: tuple[int, int, int] = SIZES, repetitions: int = 5
) -> dict[str, float]:
    """The speedup of each kernel."""
    speedups = {}
    for name, code in KERNELS.items():
        measured = measure_kernel(
            pool, code, sizes, BOUND, repetitions=repetitions, timeout_s=600.0
        )
        assert measured.status is KernelStatus.CORRECT, (name, measured)
        speedups[name] = measured.speedup
    return speedups


def is_ranked(speedups: dict[str, float]) -> bool:
    values = list(speedups.values())
    return values == sorted(values)


def measure_call(pool: SandboxPool, code: str) -> float:
    """CPU seconds of a call, from reading the code and the matrices to writing the result."""
    rng = np.random.default_rng(0)
    timings = [time_once(pool, code, draw_matrices(SIZES, BOUND, rng), 60.0) for _ in range(9)]
    return statistics.median(timing.cpu_s for timing in timings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep it busy")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    pool = open_pool_of_run(None)
    rank_once(pool, repetitions=1)  # the first sandboxes start
    start, own_start = time.perf_counter(), time.process_time()
    with busy_processes(args.busy):
        repeats = [rank_once(pool) for _ in range(args.repeats)]
        wall_s = time.perf_counter() - start
        own_s = time.process_time() - own_start
        border_s = measure_call(pool, "def matmul(A, B): return A")
        reference_s = measure_call(pool, REFERENCE)
    for name in KERNELS:
        values = [repeat[name] for repeat in repeats]
        print(
            f"{name:20}{statistics.median(values):6.2f} times the reference's speed "
            f"({min(values):.2f} to {max(values):.2f})"
        )
    grades = args.repeats * len(KERNELS)
    print(f"ranked right: {sum(map(is_ranked, repeats))} of {args.repeats}")
    print(f"a grade: {1e3 * wall_s / grades:.0f} ms, {1e3 * own_s / grades:.0f} ms of it here")
    print(f"a call whose function only returns: {1e3 * border_s:.1f} ms")
    print(f"a call of the reference: {1e3 * reference_s:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
