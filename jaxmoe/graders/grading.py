# SPDX-License-Identifier: Apache-2.0
"""Grade code by tests that it cannot see: the code in one sandbox, the tests in another.

The tests call the code through this process. Arguments and values cross as plain data, so the
expected values, and what decides whether a test passed, are never where the code runs.
Next: jaxmoe/graders/code_scorer.py is the reward function.
"""

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.graders.code_tests import PREPARE_TESTS, add_calls
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.process import CallResult, CallStatus, Sandbox, SandboxError


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
_MODULE = "solution"  # the answer's `__name__`, so that its main guard does not run
_KILLED = ("SIGKILL", "SIGTERM")


class _SandboxLost(SandboxError):
    """A sandbox ended in the middle of a grade, and no program in it can have done that."""


@dataclass(frozen=True)
class Grade:
    """The outcome, and a line about it.

    is_rows_fault: True if the tests failed without the answer's doing, as they fail every answer.
    """

    status: GradeStatus
    detail: str = ""
    is_rows_fault: bool = False


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

    The program runs as a module that is imported: its `if __name__ == "__main__":` does not run.
    tests: in a form of jaxmoe/graders/code_tests.py: assertions, `check(candidate)`, test
        functions, or cases of unittest.
    setup: code for both sides, such as imports and helpers of the prompt.
    timeout_s: for all of it, without the start of sandboxes.
    Raises: SandboxError if no sandbox starts, or if one was killed from outside, twice.
    """
    programs = setup, code, tests
    try:
        return _grade_once(pool, programs, entry_point, timeout_s)
    except _SandboxLost:
        return _grade_once(pool, programs, entry_point, timeout_s)


def _grade_once(
    pool: SandboxPool, programs: tuple[str, str, str], entry_point: str, timeout_s: float
) -> Grade:
    setup, code, tests = programs
    candidate = pool.acquire()
    deadline = time.monotonic() + timeout_s
    try:
        prepared = candidate.run(setup, _remaining(deadline), module=_MODULE)
        _check_lost(prepared)
        if not prepared.is_alive:  # nothing of the answer ran
            return Grade(GradeStatus.BAD_TEST, prepared.error or prepared.status.value, True)
        loaded = candidate.run(code, _remaining(deadline))
        _check_lost(loaded)
        if loaded.status is not CallStatus.OK:
            return _grade_call(loaded)
        start = time.monotonic()
        examiner = pool.acquire()
        deadline += time.monotonic() - start
        try:
            calls = _AnswerCalls(candidate, entry_point, deadline)
            return _grade_tests(_run_tests(examiner, calls, (setup, tests)), calls)
        finally:
            pool.release(examiner)
    finally:
        pool.release(candidate)


@dataclass
class _AnswerCalls:
    """The calls of the answer by its tests, and what they came to."""

    candidate: Sandbox
    entry_point: str
    deadline: float
    n_calls: int = 0
    faults: list[Grade] = field(default_factory=list)  # of the code; tests cannot hide one
    last_raised: Grade | None = None
    lost: CallResult | None = None

    def answer(self, _: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the answer for its tests."""
        self.n_calls += 1
        timeout_s = _remaining(self.deadline)
        result = self.candidate.call(self.entry_point, arguments, timeout_s, named)
        if result.status is CallStatus.OK:
            return result.value
        if result.is_lost:
            self.lost = result
        grade = _grade_call(result)
        if grade.status is not GradeStatus.RAISED:
            self.faults.append(grade)
        self.last_raised = grade
        raise RuntimeError(result.error or grade.status.value)  # of this name in the tests


def _run_tests(examiner: Sandbox, calls: _AnswerCalls, programs: tuple[str, str]) -> CallResult:
    setup, tests = programs
    for program in (setup, PREPARE_TESTS):
        result = examiner.run(program, _remaining(calls.deadline))
        if not result.is_alive:
            return result
    outside = {"candidate": calls.answer, calls.entry_point: calls.answer}
    return examiner.run(add_calls(tests), _remaining(calls.deadline), outside)


def _grade_tests(result: CallResult, calls: _AnswerCalls) -> Grade:
    if calls.lost is not None:
        raise _SandboxLost(f"the sandbox of an answer ended with {calls.lost.error}")
    if calls.faults:
        return calls.faults[0]
    # An answer has only values to reach the sandbox of its tests, whose memory is limited: what is
    # too large for it is an error there, or the interpreter ends by other signals or by itself,
    # which an answer is not paid for. Of these signals none can be sent from inside. An answer that
    # was free of a reward whenever its tests ended would learn to end them.
    is_killed = result.status is CallStatus.CRASHED and result.error in _KILLED
    if result.is_lost or is_killed:
        raise _SandboxLost(f"the sandbox of tests ended with {result.error}")
    if result.status is CallStatus.TIMEOUT:
        return Grade(GradeStatus.TIMEOUT)
    if not calls.n_calls:  # nothing of the answer has reached the tests
        return Grade(GradeStatus.BAD_TEST, result.error or result.output[-200:], True)
    if result.status is CallStatus.OK:
        return Grade(GradeStatus.PASSED)
    if result.error == "AssertionError":
        return Grade(GradeStatus.FAILED)
    # An argument whose type has no plain form: values are plain, so none of them gave it the type.
    if result.error == "NotPlainData":
        return Grade(GradeStatus.BAD_TEST, result.error, True)
    if calls.last_raised and result.status is CallStatus.ERROR:
        return calls.last_raised
    # Comparing a value of another type than expected may raise in the tests: `None < 3`.
    if result.error in ("TypeError", "AttributeError", "IndexError", "KeyError", "ValueError"):
        return Grade(GradeStatus.FAILED, result.error)
    return Grade(GradeStatus.BAD_TEST, result.error or result.output[-200:])


def _check_lost(result: CallResult) -> None:
    if result.is_lost:
        raise _SandboxLost(f"a sandbox ended with {result.error} before a program")


def _grade_call(result: CallResult) -> Grade:
    if result.status in _ENDED:
        return Grade(_ENDED[result.status], result.error)
    is_plain = result.error != "NotPlainData"
    return Grade(GradeStatus.RAISED if is_plain else GradeStatus.NOT_PLAIN, result.error)


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
