# SPDX-License-Identifier: Apache-2.0
"""Rows of the kernel task: python docs/examples/kernel_task/kernel_rows.py > kernels.jsonl

The sizes differ, so that each row is a question of its own. Next: kernel_scorer.py.
"""

import json
import random
from typing import Any

N_ROWS, BOUND = 40, 100
SIZES = range(64, 97, 4)


def make_kernel_row(sizes: tuple[int, int, int], bound: int = BOUND) -> dict[str, Any]:
    """A row that asks for the product of n × k and k × m integers within ±bound; (n, k, m)."""
    n, k, m = sizes
    return {
        "prompt": (
            "Write a Python function matmul(A, B) that returns the product of two matrices, and "
            f"make it as fast as you can. A is a list of {n} lists of {k} integers, B a list of "
            f"{k} lists of {m} integers, all from -{bound} to {bound}. Return a list of {n} lists "
            f"of {m} integers. Use plain Python: no imports, no classes, no names that begin with "
            "two underscores, no files. Only the processor's time from reading your code to the "
            "result counts. Answer with one block of code."
        ),
        "sizes": [n, k, m],
        "bound": bound,
    }


def list_kernel_rows() -> list[dict[str, Any]]:
    """The rows of the task; the three sizes of a row are distinct."""
    rng = random.Random(0)
    chosen: dict[tuple[int, int, int], None] = {}
    while len(chosen) < N_ROWS:
        n, k, m = rng.sample(SIZES, 3)
        chosen[n, k, m] = None
    return [make_kernel_row(sizes) for sizes in chosen]


if __name__ == "__main__":
    for row in list_kernel_rows():
        print(json.dumps(row))
