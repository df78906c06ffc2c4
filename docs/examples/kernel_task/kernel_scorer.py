# SPDX-License-Identifier: Apache-2.0
"""The reward of a fast matrix product in plain Python: kernel_scorer:score_kernel.

Rows have the columns `sizes` and `bound`; kernel_rows.py makes them. An answer is
paid for its speed, and only for what was measured outside of its interpreter.
Next: kernel_rules.py refuses code; kernel_timing.py measures it.
"""

import ast
import asyncio
import functools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kernel_rules import REFUSALS, find_refusals
from kernel_timing import KernelStatus, measure_kernel

from jaxmoe.config import ConfigError, require
from jaxmoe.data.rows import Row
from jaxmoe.graders.code_scorer import extract_code, open_pool_of_run
from jaxmoe.graders.suspicious_code import parse_code
from jaxmoe.rewards.reward_specs import checked_by
from jaxmoe.sandbox.process import MAX_REQUEST_CHARS, SandboxError

ENTRY_POINT = "matmul"
_MAX_REPETITIONS = 1000
_COUNTED = [status.value for status in KernelStatus if status is not KernelStatus.CORRECT]
_EXAMPLE = '{"prompt": "…", "sizes": [64, 72, 80], "bound": 100}'


def check_kernel_task(
    rows: Sequence[Row],
    *,
    repetitions: Any = 5,
    timeout_s: Any = 10.0,
    max_speedup: Any = 10.0,
    correct_share: Any = 0.1,
    **_options: Any,
) -> None:
    """Raise ConfigError for rows without matrices, and for options by which nothing is measured."""
    rules: list[tuple[str, Any, type[Any] | tuple[type[Any], ...], str, float, float, Any]] = [
        (
            "repetitions",
            repetitions,
            int,
            f"a whole number from 1 to {_MAX_REPETITIONS}",
            1,
            _MAX_REPETITIONS,
            5,
        ),
        ("timeout_s", timeout_s, (int, float), "a number of seconds from 0.1 to 1e6", 0.1, 1e6, 10),
        ("max_speedup", max_speedup, (int, float), "a number from 1.01 to 1e6", 1.01, 1e6, 10),
        ("correct_share", correct_share, (int, float), "a number from 0 to 0.99", 0.0, 0.99, 0.1),
    ]
    for name, value, kinds, requirement, low, high, example in rules:
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        require(
            is_number and low <= value <= high,
            f"score_kernel({name}=…) must be {requirement}, got {value!r}. Try {name}={example}.",
        )
    for number, row in enumerate(rows):
        try:
            read_matrices(row.columns)
        except ConfigError as error:
            raise ConfigError(f"{row.location or f'row {number}'}: {error}") from error


def read_matrices(columns: Mapping[str, Any]) -> tuple[tuple[int, int, int], int]:
    """The sizes (n, k, m) of a row's factors n × k and k × m, and the bound of their integers.

    Raises: ConfigError if it has none, or if they cannot be sent or multiplied exactly.
    """
    sizes, bound = columns.get("sizes"), columns.get("bound")
    sizes = list(sizes) if isinstance(sizes, list | tuple) else []
    if len(sizes) != 3 or type(bound) is not int or not all(_is_size(x) for x in [*sizes, bound]):
        raise ConfigError(
            "score_kernel needs rows with three sizes and a bound, whole numbers of 2 or more; got "
            f"sizes={columns.get('sizes')!r:.40} and bound={bound!r:.20}. "
            f"Write rows such as {_EXAMPLE}."
        )
    n, k, m = sizes
    # A number has a sign, a comma and a space; a row its brackets.
    n_chars = (n * k + k * m) * (len(str(bound)) + 3) + 4 * (n + k)
    n_result_chars = n * m * (len(str(k * bound**2)) + 3) + 4 * n
    limit = int(0.9 * MAX_REQUEST_CHARS)
    if max(n_chars, n_result_chars) > limit or k * bound**2 >= 2**63:
        raise ConfigError(
            f"score_kernel needs factors and a product of at most {limit:,} characters each, and "
            f"numbers that fit into 64 bits; got sizes={[n, k, m]} and bound={bound}, which have "
            f"up to {n_chars:,} and {n_result_chars:,}. Write rows such as {_EXAMPLE}."
        )
    return (n, k, m), bound


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 2


@checked_by(check_kernel_task)
async def score_kernel(
    prompt: Any,
    response: str,
    row: Mapping[str, Any],
    *,
    repetitions: int = 5,
    timeout_s: float = 10.0,
    max_speedup: float = 10.0,
    correct_share: float = 0.1,
    sandbox: Mapping[str, Any] | None = None,
) -> Mapping[str, float | None]:
    """Reward from 0 to 1 for the speed of the response's `matmul`; 0 if a product is incorrect.

        correct_share + (1 − correct_share) · log(speedup) / log(max_speedup), its fraction in 0…1

    The logarithm, so that each doubling of the speed earns the same. The speedup is that over a
    plain triple loop (`kernel_timing.measure_kernel`); correct answers have it as the part
    `speedup`. Each way to fail is a part too, and code may be refused for several reasons.

    repetitions: with an interpreter and matrices of their own.
    timeout_s: of one call.
    max_speedup: what earns 1.
    correct_share: what a right product earns however slow it is, so that there is a way from wrong
        answers to fast ones.
    sandbox: fields of SandboxConfig; a run passes those of its config.
    If a sandbox does not start, the score is None: the answer has no reward.
    Raises: ConfigError for a row without matrices, and without `sandbox` if none starts here.
    """
    sizes, bound = read_matrices(row)
    names = ("correct", "no_code", "no_sandbox", *REFUSALS.values(), *_COUNTED)
    counts = dict.fromkeys(names, 0.0)
    code = extract_code(response, ENTRY_POINT)
    if code is None:
        return {"score": 0.0} | counts | {"no_code": 1.0}
    if refused := find_refusals(parse_code(code) or ast.Module([], [])):
        return {"score": 0.0} | counts | {REFUSALS[kind]: 1.0 for kind in refused}
    try:
        pool = open_pool_of_run(sandbox)
        measured = await asyncio.get_running_loop().run_in_executor(
            _open_threads(),
            functools.partial(
                measure_kernel,
                pool,
                code,
                sizes,
                bound,
                repetitions=repetitions,
                timeout_s=timeout_s,
            ),
        )
    except SandboxError:
        return {"score": None} | counts | {"no_sandbox": 1.0}
    counts[measured.status.value] = 1.0
    if measured.status is not KernelStatus.CORRECT:
        return {"score": 0.0} | counts
    share = min(1.0, max(0.0, math.log(measured.speedup) / math.log(max_speedup)))
    score = correct_share + (1.0 - correct_share) * share
    return {"score": score} | counts | {"speedup": measured.speedup}


@functools.lru_cache(maxsize=1)
def _open_threads() -> ThreadPoolExecutor:
    """Threads of this process in which kernels are measured, one for two processors.

    More at once would take caches and memory from each other.
    """
    return ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2), "kernel")
