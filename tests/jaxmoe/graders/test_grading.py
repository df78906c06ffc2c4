# SPDX-License-Identifier: Apache-2.0
"""Code is paid for right values and for nothing else; each other outcome has a name."""

import asyncio
import json
import time

import numpy as np
import pytest

from jaxmoe.collection.tasks import open_task
from jaxmoe.config import ConfigError
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.rows import Row
from jaxmoe.graders import code_scorer
from jaxmoe.graders.code_scorer import check_tests, extract_code, score_code
from jaxmoe.graders.grading import GradeStatus, grade_code
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.rewards import read_rewards, score_samples
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.process import Sandbox, SandboxError
from tests.jaxmoe.code_cheats import CODE_CHEATS, FORGE, HONEST, PROMPT, TESTS, WEAK_TESTS
from tests.jaxmoe.sandbox.kinds import BrokenLauncher, end_from_outside, first_kind


def grade(pool, code, tests=TESTS, timeout_s=20.0):
    return grade_code(pool, code, "f", tests, setup=PROMPT, timeout_s=timeout_s)


def test_right_code_passes(pool):
    assert grade(pool, "def f(x): return 2 * x").status is GradeStatus.PASSED
    assert grade(pool, "f = lambda x: math.floor(2) * x").status is GradeStatus.PASSED
    plain = "assert f(2) == 4\nassert candidate(1) == 2"
    assert grade(pool, "def f(x): return 2 * x", plain).status is GradeStatus.PASSED


@pytest.mark.parametrize("name", CODE_CHEATS)
def test_a_cheat_is_named_and_not_paid(pool, name):
    cheat = CODE_CHEATS[name]
    timeout_s = 1.5 if "timeout" in cheat.statuses else 20.0
    assert grade(pool, cheat.code, timeout_s=timeout_s).status in cheat.statuses


@pytest.mark.parametrize("name", WEAK_TESTS)
def test_weak_tests_pay_no_cheat(pool, name):
    tests, code = WEAK_TESTS[name]
    assert grade(pool, code, tests).status is GradeStatus.FAILED
    assert grade(pool, HONEST, tests).status is GradeStatus.PASSED


MAIN_GUARDS = {
    "reads stdin": "def f(x): return 2 * x\nif __name__ == '__main__':\n    print(f(int(input())))",
    "unittest": "import unittest\ndef f(x): return 2 * x\nclass T(unittest.TestCase):\n"
    "    def test(self): self.assertEqual(f(1), 2)\nif __name__ == '__main__': unittest.main()",
    "arguments": "import sys\ndef f(x): return 2 * x\nif '__main__' == __name__:\n    sys.argv[1]",
    "exit": "import sys\ndef f(x): return 2 * x\nif __name__ == '__main__':\n    sys.exit(f(0))",
}


@pytest.mark.parametrize("name", MAIN_GUARDS)
def test_a_program_with_a_main_guard_passes(pool, name):
    assert grade(pool, MAIN_GUARDS[name]).status is GradeStatus.PASSED


def test_a_main_guard_cannot_replace_the_function(pool):
    code = "def f(x): return 0\nif __name__ == '__main__':\n    def f(x): return 2 * x"
    assert grade(pool, code).status is GradeStatus.FAILED


def test_graded_programs_can_look_up_their_classes(pool):
    code = """
import dataclasses, pickle, typing
@dataclasses.dataclass
class Double:
    x: "typing.ClassVar[int]" = 0
    y: "Double | None" = None
class Pair(typing.NamedTuple):
    x: "int"
def f(x):
    typing.get_type_hints(Double), pickle.loads(pickle.dumps([Double(), Pair(1), f]))
    return 2 * x
"""
    assert grade(pool, code).status is GradeStatus.PASSED


@pytest.fixture
def kill_at_calls(pool, monkeypatch):
    """kill_at_calls(number, times): kill a grade's sandbox, of the answer (0) or the tests (1)."""

    def kill_at_calls(number, times):
        sandboxes, acquire, call = [], pool.acquire, Sandbox.call

        def acquire_noted():
            sandboxes.append(acquire())
            return sandboxes[-1]

        def kill_and_call(sandbox, *arguments, **named):
            nonlocal times
            times -= 1
            if times >= 0:
                end_from_outside(sandboxes[number - 2])
            return call(sandbox, *arguments, **named)

        monkeypatch.setattr(pool, "acquire", acquire_noted)
        monkeypatch.setattr(Sandbox, "call", kill_and_call)

    return kill_at_calls


@pytest.mark.parametrize("number", [0, 1], ids=["answer", "tests"])
@pytest.mark.parametrize("code", [HONEST, "def f(x): return 0"], ids=["right", "wrong"])
def test_a_sandbox_killed_once_changes_no_grade(pool, kill_at_calls, number, code):
    expected = GradeStatus.PASSED if code == HONEST else GradeStatus.FAILED
    kill_at_calls(number, times=1)
    assert grade(pool, code).status is expected


@pytest.mark.parametrize("number", [0, 1], ids=["answer", "tests"])
def test_sandboxes_killed_twice_leave_no_grade(pool, kill_at_calls, number):
    kill_at_calls(number, times=99)
    with pytest.raises(SandboxError, match="SIGKILL"):
        grade(pool, HONEST)


ENDS_AFTER_REPLY = """
import os, signal
write = os.write
def write_and_end(descriptor, content):
    write(descriptor, content)
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)
def f(x): return 0
os.write = write_and_end
"""


def test_programs_that_end_themselves_are_not_lost(pool):
    assert grade(pool, ENDS_AFTER_REPLY).status is GradeStatus.CRASHED


@pytest.mark.parametrize("act", ["os._exit(3)", "os.abort()", "[0] * 10**10", "9 ** 9 ** 9"])
def test_an_answer_cannot_end_its_examiner_unpaid(pool, act):
    """Tests that run what an answer returns: a death that an answer can cause has a reward."""
    tests = "import os\nassert eval(f(1)) == 3"
    result = grade(pool, f"def f(x): return {act!r}", tests, timeout_s=3.0)
    assert result.status in (GradeStatus.BAD_TEST, GradeStatus.TIMEOUT)
    assert not result.is_rows_fault


def test_late_tests_are_late_and_not_lost(pool):
    slow = "import time\ntime.sleep(1.0)"
    result = grade_code(pool, HONEST, "f", TESTS, setup=slow, timeout_s=1.7)
    assert result.status is GradeStatus.TIMEOUT


def test_large_arguments_of_tests_are_sent(pool):
    tests = "x = list(range(80_000))\nassert f(x) == x + x"
    assert grade(pool, HONEST, tests).status is GradeStatus.PASSED
    assert grade(pool, "def f(x): return 0", tests).status is GradeStatus.FAILED


OBJECT = "class T: pass\nt = T()\n"
DEEP = "r = []\nfor _ in range(80): r = [r]\n"


@pytest.mark.parametrize(
    "tests",
    [
        OBJECT + "assert f(t) == 3",
        OBJECT + "assert f(1) == 2\nassert f([t]) == 3",  # no value of an answer makes it plain
        "double = lambda x: 2 * x\nassert f(double) == 2",
        DEEP + "assert f(r) == 80",
        "assert f('x' * 9_000_000) == 3",
        "assert 1 == 2\nf(1)",
    ],
)
def test_tests_that_cannot_ask_are_at_fault(pool, tests):
    result = grade(pool, HONEST, tests)
    assert result.status is GradeStatus.BAD_TEST and result.is_rows_fault


def test_values_that_spoil_the_tests_are_unpaid(pool):
    deep = "def f(x):\n    r = []\n    for _ in range(50): r = [r]\n    return r"
    long = "def f(x): return 'x' * 7_000_000"
    tests = "assert f([f(1), f(2)]) == [2, 4, 2, 4]"
    assert grade(pool, HONEST, tests).status is GradeStatus.PASSED
    for code in (deep, long):
        result = grade(pool, code, tests)
        assert result.status is GradeStatus.BAD_TEST and not result.is_rows_fault


class SlowPool(SandboxPool):
    """A pool on a machine that takes a second to start a sandbox."""

    def acquire(self):
        time.sleep(1.0)
        return super().acquire()


def test_a_slow_sandbox_start_costs_answers_no_time():
    pool = SlowPool(Launcher(first_kind(), SandboxConfig(disk_mb=8)), n_warm=2)
    pool.acquire()  # the others start meanwhile
    assert grade(pool, HONEST, timeout_s=0.9).status is GradeStatus.PASSED
    pool.close()


def test_numbers_of_equal_hash_cost_the_trainer_nothing(pool):
    """A set of them takes 20 s or more to make; a program can write one without making it."""
    numbers = "[{'int': hex(i * (2**61 - 1))} for i in range(40_000)]"
    code = FORGE.replace("VALUE", f"{{'set': {numbers}}}")
    # The machine's own measure: as many collisions by themselves, in this process.
    start = time.process_time()
    {i * (2**61 - 1) for i in range(10_000)}
    made_s = 16 * (time.process_time() - start)  # of 40,000: the work grows with the square
    start = time.process_time()
    assert grade(pool, code, timeout_s=3.0).status is GradeStatus.TIMEOUT
    assert time.process_time() - start < made_s


def test_tests_that_catch_exceptions_hide_no_crash(pool):
    tests = "try: f(1)\nexcept Exception: pass"
    assert grade(pool, "import os\ndef f(x): os._exit(0)", tests).status is GradeStatus.CRASHED
    assert grade(pool, "def f(x): return 1 / 0", tests).status is GradeStatus.PASSED


def test_broken_tests_are_not_the_answers_fault(pool):
    correct = "def f(x): return 2 * x"
    for tests in ("pass", "def check(c): pass", "1 +", "undefined()"):
        result = grade(pool, correct, tests)
        assert result.status is GradeStatus.BAD_TEST and result.is_rows_fault


def test_code_is_read_in_blocks_and_after_prompts():
    whole = "def f(x): return 1"
    assert extract_code(f"So:\n```python\n{whole}\n```\nDone.", "f") == whole
    assert extract_code(f"```\nx = 1\n```\n```py\n{whole}\n```", "f") == whole
    assert extract_code("    return 2 * x\n", "f", PROMPT) == PROMPT + "    return 2 * x\n"
    assert extract_code("I do not know.", "f", "text") is None
    below = "try:\n    import x\nexcept ImportError:\n    if 1:\n        def f(x): return x"
    assert extract_code(below, "f") == below
    assert extract_code("def g():\n    def f(x): return x", "f") is None
    assert extract_code("```python\ndef g(x): return 1\n```", "f") is None


def test_answers_cannot_delay_the_search_for_code():
    attributes = "a" + ".b" * 900 + " = 1\ndef f(x): return x"
    assert extract_code(attributes, "f") == attributes
    start = time.process_time()
    assert extract_code("```" + " " * 30_000 + "x", "f") is None
    assert time.process_time() - start < 1  # 7 s by a search of quadratic time


def test_an_answer_without_a_sandbox_has_no_reward(monkeypatch):
    fields = {"kind": first_kind(), "disk_mb": 0}
    monkeypatch.setattr(code_scorer, "choose_sandbox", lambda c: BrokenLauncher(c.kind, c))
    rewards = read_rewards(f"jaxmoe.graders.code_scorer:score_code(sandbox={fields})", ["prompt"])
    row = Row(PROMPT, "", columns={"prompt": PROMPT, "test": TESTS, "entry_point": "f"})
    scores = score_samples(rewards, [Sample(0, row, ParsedResponse(HONEST), [1])])
    assert np.isnan(scores.rewards).all()
    parts = scores.parts[0]
    assert parts["reward/score_code/no_sandbox/mean"] == 1.0
    assert parts["reward/score_code/timeout/mean"] == 0.0 == parts["hack/exits"]


def test_a_run_continues_without_a_starting_sandbox(monkeypatch):
    def fail(_):
        raise ConfigError("sandbox.kind=auto must start on this machine")

    monkeypatch.setattr(code_scorer, "choose_sandbox", fail)
    row = {"prompt": PROMPT, "test": TESTS, "entry_point": "f"}
    assert score(HONEST, row, sandbox={"disk_mb": 1})["score"] is None
    with pytest.raises(ConfigError, match="must start"):  # no run, where one started before
        code_scorer._open_pool.cache_clear()
        score(HONEST, row)
    with pytest.raises(ConfigError, match="sandbox.memory_mb"):
        score(HONEST, row, sandbox={"memory_mb": 1})


def score(response, row, **options):
    return asyncio.run(score_code(row.get("prompt"), response, row, **options))


def test_the_reward_counts_each_outcome_by_name():
    first_kind()
    row = {"prompt": PROMPT, "test": TESTS, "entry_point": "f"}
    correct = score("```python\ndef f(x):\n    return 2 * x\n```", row)
    assert correct["score"] == 1.0 and not any(x for name, x in correct.items() if name != "score")
    timed_out = score("def f(x):\n    while True: pass", row, timeout_s=1.0)
    assert timed_out["score"] == 0.0 and timed_out["timeout"] == 1.0
    broken = score(HONEST, {**row, "test": "undefined()"})
    assert broken["score"] is None and broken["bad_test"] == 1.0
    none = score("I cannot.", {**row, "prompt": "Write f."})
    assert none["no_code"] == 1.0 and sum(none.values()) == 1.0


def test_a_dry_run_refuses_a_row_without_tests(tmp_path):
    first_kind()
    file = tmp_path / "rows.jsonl"
    cfg = override(
        load_config("tiny.py"),
        f"data.task={file}",
        "data.options={}",
        "data.train_rows=1",
        "data.held_out_rows=1",
        "warmup.steps=0",
        "data.max_prompt_tokens=256",
        "data.rewards=jaxmoe.graders.code_scorer:score_code",
    )
    complete = {"test": TESTS, "entry_point": "f"}
    for columns in (complete, {"entry_point": "f"}):
        rows = [{"prompt": f"{PROMPT}    # {i}\n", **columns} for i in range(2)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if columns is complete:
            open_task(cfg)
    with pytest.raises(ConfigError, match=r"rows.jsonl:\d: score_code needs .* test"):
        open_task(cfg)


def test_a_row_without_tests_is_refused():
    with pytest.raises(ConfigError, match="test and entry_point"):
        score("x", {"prompt": "p", "answer": "3"})


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "10", True])
def test_an_impossibly_short_time_limit_is_refused(timeout_s):
    with pytest.raises(ConfigError, match="seconds above 0, got"):
        check_tests([], timeout_s=timeout_s)
