# SPDX-License-Identifier: Apache-2.0
"""Grade code by tests that it cannot see: the code in one sandbox, the tests in another.

The tests call the code through this process. Arguments and values cross as plain data, so the
expected values, and what decides whether a test passed, are never where the code runs.
Next: jaxmoe/graders/code_scorer.py is the reward function.
"""

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.graders.code_tests import PREPARE_TESTS, add_calls
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.process import CallResult, CallStatus, Sandbox


class GradeStatus(enum.StrEnum):
    """The outcome of grading a piece of code."""

    PASSED = "passed"
    FAILED = "failed"  # a value was not the expected one
    RAISED = "raised"  # the code raised
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # the code ended its interpreter
    FORGED = "forged"  # it wrote to the interpreter's pipe
    UNFINISHED_TASKS = "unfinished_tasks"  # it left threads behind
    NOT_PLAIN = "not_plain"  # it returned something else than numbers, texts and their containers
    BAD_TEST = "bad_test"  # the tests themselves failed, or called nothing


_ENDED = {
    CallStatus.TIMEOUT: GradeStatus.TIMEOUT,
    CallStatus.CRASHED: GradeStatus.CRASHED,
    CallStatus.FORGED: GradeStatus.FORGED,
    CallStatus.UNFINISHED_TASKS: GradeStatus.UNFINISHED_TASKS,
}


@dataclass(frozen=True)
class Grade:
    """The outcome, and a line about it."""

    status: GradeStatus
    detail: str = ""


def grade_code(
    pool: SandboxPool,
    code: str,
    entry_point: str,
    tests: str,
    *,
    setup: str = "",
    timeout_s: float = 10.0,
) -> Grade:
    """Grade the function `entry_point` of a program by tests that call it, or `candidate`.

    tests: in a form of jaxmoe/graders/code_tests.py: assertions, `check(candidate)`, test
        functions, or cases of unittest.
    setup: code for both sides, such as imports and helpers of the prompt.
    timeout_s: for all of it, without the start of sandboxes.
    Raises: SandboxError if no sandbox starts.
    """
    candidate = pool.acquire()
    deadline = time.monotonic() + timeout_s
    try:
        candidate.run(setup, _remaining(deadline))
        loaded = candidate.run(code, _remaining(deadline))
        if loaded.status is not CallStatus.OK:
            return _grade_call(loaded)
        start = time.monotonic()
        examiner = pool.acquire()
        deadline += time.monotonic() - start
        try:
            return _run_tests(candidate, examiner, entry_point, (setup, tests), deadline)
        finally:
            pool.release(examiner)
    finally:
        pool.release(candidate)


def _run_tests(
    candidate: Sandbox,
    examiner: Sandbox,
    entry_point: str,
    programs: tuple[str, str],
    deadline: float,
) -> Grade:
    faults: list[Grade] = []  # of the code; a test that catches exceptions cannot hide one
    n_calls = 0

    def call_candidate(_: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        nonlocal n_calls
        n_calls += 1
        result = candidate.call(entry_point, arguments, _remaining(deadline), named)
        if result.status is CallStatus.OK:
            return result.value
        grade = _grade_call(result)
        if grade.status is not GradeStatus.RAISED:
            faults.append(grade)
        last_raised[:] = [grade]
        raise RuntimeError(result.error or grade.status.value)  # of this name in the tests

    last_raised: list[Grade] = []
    setup, tests = programs
    outside = {"candidate": call_candidate, entry_point: call_candidate}
    examiner.run(setup, _remaining(deadline))
    examiner.run(PREPARE_TESTS, _remaining(deadline))
    result = examiner.run(add_calls(tests), _remaining(deadline), outside)
    if faults:
        return faults[0]
    if result.status is CallStatus.OK:  # nothing of the answer ran there
        return Grade(GradeStatus.PASSED if n_calls else GradeStatus.BAD_TEST)
    if result.status is CallStatus.TIMEOUT:
        return Grade(GradeStatus.TIMEOUT)
    if result.error == "AssertionError":
        return Grade(GradeStatus.FAILED)
    if last_raised and result.status is CallStatus.ERROR:
        return last_raised[0]
    # Comparing a value of another type than expected may raise in the tests: `None < 3`.
    if result.error in ("TypeError", "AttributeError", "IndexError", "KeyError", "ValueError"):
        return Grade(GradeStatus.FAILED, result.error)
    return Grade(GradeStatus.BAD_TEST, result.error or result.output[-200:])


def _grade_call(result: CallResult) -> Grade:
    if result.status in _ENDED:
        return Grade(_ENDED[result.status], result.error)
    is_plain = result.error != "NotPlainData"
    return Grade(GradeStatus.RAISED if is_plain else GradeStatus.NOT_PLAIN, result.error)


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
