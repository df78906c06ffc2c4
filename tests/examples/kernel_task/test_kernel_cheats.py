# SPDX-License-Identifier: Apache-2.0
"""No cheat is paid for a fast matrix product, and none would be if its code were not refused."""

import asyncio
import functools

import pytest
from kernel_rows import make_kernel_row
from kernel_scorer import score_kernel
from kernel_timing import KernelStatus, measure_kernel

from tests.examples.kernel_task.kernel_cheats import CHEATS, HONEST, HONEST_KERNEL
from tests.jaxmoe.sandbox.kinds import open_sandbox

SIZES, BOUND = (36, 80, 44), 100
ROW = make_kernel_row(SIZES, BOUND)
CORRECT_SHARE = 0.1
# Of two times of the same work; a trick that hid half of the work would give 2.
NO_FASTER = 1.5


@functools.cache
def list_all_builtins():
    """Those of an interpreter in a sandbox; other tests add to this one's."""
    with open_sandbox() as sandbox:
        return tuple(sandbox.run("import builtins\nprint(*dir(builtins))", 20.0).output.split())


def measure(pool, code, timeout_s=20.0, repetitions=3):
    names = list_all_builtins()
    assert {"__import__", "getattr", "open"} <= set(names)
    return measure_kernel(
        pool,
        code,
        SIZES,
        BOUND,
        repetitions=repetitions,
        timeout_s=timeout_s,
        builtin_names=names,
    )


@pytest.fixture(scope="module")
def honest(pool):
    return measure(pool, HONEST_KERNEL, repetitions=7)


def score(code, **options):
    options = {"repetitions": 2, **options}
    return asyncio.run(score_kernel(ROW["prompt"], f"```python\n{code}\n```", ROW, **options))


def test_an_honest_kernel_is_paid_under_all_rules(honest):
    assert honest.status is KernelStatus.CORRECT and honest.speedup > 1.2
    parts = score(HONEST_KERNEL)
    assert parts["correct"] == 1.0 and parts["score"] > CORRECT_SHARE and parts["speedup"] > 1.2


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_not_paid_and_is_counted(name, honest):
    cheat = CHEATS[name]
    parts = score(cheat.code, timeout_s=1.0 if cheat.part == "timeout" else 20.0)
    assert {**parts, **{n.removeprefix("hack/"): x for n, x in parts.items()}}[cheat.part] == 1.0
    if cheat.part == "correct":
        assert parts["speedup"] < NO_FASTER * honest.speedup
    else:
        assert parts["score"] == 0.0 and "speedup" not in parts


@pytest.mark.parametrize("name", [name for name, cheat in CHEATS.items() if cheat.unrefused])
def test_a_cheat_that_is_not_refused_gains_nothing(name, pool, honest):
    cheat = CHEATS[name]
    is_late = "timeout" in cheat.unrefused
    measured = measure(
        pool,
        cheat.code,
        timeout_s=1.0 if is_late else 20.0,
        repetitions=3 if HONEST in cheat.unrefused else 1,
    )
    if measured.status is KernelStatus.CORRECT:
        assert HONEST in cheat.unrefused
        assert measured.speedup < NO_FASTER * honest.speedup
    else:
        assert measured.status in cheat.unrefused


def test_time_that_passes_is_not_counted(pool, honest):
    """Only the processor's time is: a busy machine costs a kernel nothing."""
    measured = measure(pool, CHEATS["asleep"].code)  # 50 ms, beside about 5 of work
    assert measured.speedup > 0.5 * honest.speedup


def test_there_are_enough_cheats():
    assert len(CHEATS) >= 50
