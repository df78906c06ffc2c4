# SPDX-License-Identifier: Apache-2.0
"""Reward functions run in a real process of their own: signals work, and what hangs is ended."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.rows import Row
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.reward_process import RewardProcess, run_inline
from jaxmoe.rewards.rewards import check_faulty, mean_part_metrics, read_rewards, score_samples

CODE = '''
import asyncio, os, signal, sys, time

calls = 0

def alarmed(response):
    """As math_verify does it: its alarm needs the main thread."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)
    signal.alarm(0)
    return 1.0

def hangs(response):
    if response == "hang":
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    return float(response)

class Limited:
    call_limit_s = 0.3

    def __call__(self, response):
        return hangs(response)

limited = Limited()

def fragile(response):
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "exit":
        os._exit(3)
    if response == "memory":
        bytearray(1 << 50)
    if response == "no text":
        raise Textless
    return float(response)

class Textless(Exception):
    def __str__(self):
        raise KeyError("no text")

async def fragile_async(response):
    await asyncio.sleep(0.01)
    return fragile(response)

def forks(response):
    """Returns twice."""
    if response == "fork":
        os.fork()
    return float(response) if response != "fork" else 7.0

def writes(response):
    print("\\x1b[2J" + response, flush=True)
    return 1.0

def memory_limit(response):
    import resource
    with open("/proc/self/oom_score_adj") as file:
        assert file.read().strip() == "1000"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrlimit(resource.RLIMIT_DATA)[0] / total

def batch(completions, **columns):
    time.sleep(60)

async def slow(response):
    await asyncio.sleep(60 if response == "hang" else 0.0)
    return float(response)

def counts(response):
    global calls
    calls += 1
    return calls

def where(response):
    return os.getpid()

def dies(response):
    os.kill(os.getpid(), signal.SIGSEGV)

def exits(response):
    os._exit(3)

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def raises(response):
    raise KeyError(response) if response == "key" else Odd(1, 2)

def unsendable(response):
    return lambda: 1

def generates(completions, **columns):
    print("a function may print")
    yield from (1.0 for _ in completions)

def spawns(response):
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    open(os.environ["CHILD_FILE"], "w").write(str(child.pid))
    child.wait()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder on the path with the functions above."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "worker_rewards.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("worker_rewards", None)


@pytest.fixture(scope="module")
def run(folder):
    """One process for all tests that leave it as it was, or ended: it starts again by itself."""
    process = RewardProcess(1.0)
    yield process
    process.close()


@pytest.fixture
def fresh_run(folder):
    process = RewardProcess(1.0)
    yield process
    process.close()


def score_in_process(run, name, *texts):
    samples = [
        Sample(i, Row("q", "4", location=f"a:{i}"), ParsedResponse(t), [1])
        for i, t in enumerate(texts)
    ]
    return score_samples(read_rewards(f"worker_rewards:{name}", []), samples, run=run)


def in_a_thread(work):
    results = []

    def store_result():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=store_result)
    thread.start()
    thread.join()
    return results[0]


def test_an_alarm_works_in_any_calling_thread(run):
    assert in_a_thread(lambda: score_in_process(run, "alarmed", "1")).rewards.tolist() == [1.0]


def test_the_process_is_started_once_and_separate(run):
    assert score_in_process(run, "counts", "a", "b", "c").rewards.tolist() == [1.0, 2.0, 3.0]
    first, second = (score_in_process(run, "where", "a").rewards[0] for _ in range(2))
    assert first == second != os.getpid()


def test_a_hanging_call_skips_its_sample_and_counts(run):
    scores = score_in_process(run, "hangs", "1", "hang", "2")
    np.testing.assert_array_equal(scores.rewards, np.array([1.0, np.nan, 2.0], np.float32))
    metrics = mean_part_metrics(scores.parts)
    assert metrics["reward/hangs/late_frac"] == metrics["reward/left_out_frac"] == 1 / 3


def test_a_sample_late_on_one_function_is_unscored(run):
    """The sum of the others would punish it as a wrong answer."""
    samples = [
        Sample(i, Row("q", "4"), ParsedResponse(t), [1]) for i, t in enumerate(["1", "hang"])
    ]
    rewards = read_rewards("worker_rewards:hangs + 0.1 * worker_rewards:alarmed", [])
    scores = score_samples(rewards, samples, run=run)
    np.testing.assert_allclose(scores.rewards, [1.1, np.nan], rtol=1e-6)
    assert scores.faults == ["", "late"]


def test_a_function_with_its_limit_may_be_late(run):
    scores = score_in_process(run, "limited", *["hang"] * 4, "1")
    assert np.isnan(scores.rewards[:4]).all() and scores.rewards[4] == 1.0
    assert mean_part_metrics(scores.parts)["reward/limited/late_frac"] == 0.8


@pytest.mark.slow
def test_three_late_calls_end_a_second_grader(run):
    samples = [Sample(i, Row("q", "4"), ParsedResponse("hang"), [1]) for i in range(8)]
    rewards = read_rewards("worker_rewards:hangs", [], "data.second_grader")
    start = time.monotonic()
    for _ in range(2):
        scores = score_samples(rewards, samples, run=run, count_errors=True)
        assert scores.faults == ["late"] * 8
    assert time.monotonic() - start < 30.0
    assert np.isnan(score_in_process(run, "hangs", "hang").rewards[0])  # not the third in a row


def test_a_function_that_never_returns_is_named(run):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"hangs must return within data.reward_timeout_s \(1\)"):
        score_in_process(run, "hangs", *["hang"] * 64)
    with pytest.raises(ConfigError, match=r"batch must return within .*row 0 \(a:0\)\. Give it"):
        score_in_process(run, "batch", "1")
    assert time.monotonic() - start < 30.0


def test_only_late_calls_of_async_functions_are_skipped(run):
    scores = score_in_process(run, "slow", "1", "hang", "2")
    np.testing.assert_array_equal(scores.rewards, np.array([1.0, np.nan, 2.0], np.float32))


@pytest.mark.parametrize(("name", "status"), [("dies", "SIGSEGV"), ("exits", "exit status 3")])
def test_a_function_that_kills_its_process_is_named(run, name, status):
    with pytest.raises(
        ConfigError,
        match=rf"{name} must not end its process; it ended with {status} on row 0 \(a:0\)",
    ):
        score_in_process(run, name, "1")
    assert score_in_process(run, "alarmed", "1").rewards.tolist() == [1.0]


@pytest.mark.parametrize("name", ["fragile", "fragile_async"])
@pytest.mark.parametrize("answer", ["crash", "exit", "memory", "no number", "no text"])
def test_only_an_answer_that_breaks_has_no_reward(run, name, answer):
    scores = score_in_process(run, name, "1", answer, "2", "3")
    np.testing.assert_array_equal(scores.rewards, np.float32([1.0, np.nan, 2.0, 3.0]))
    assert scores.faults == ["", "raised", "", ""]
    assert mean_part_metrics(scores.parts)[f"reward/{name}/raised_frac"] == 0.25
    assert f"data.rewards: {name} failed on row 1 (a:1)" in scores.first_fault
    check_faulty(scores, 0.25)
    with pytest.raises(ConfigError, match=r"max_lost_frac \(0.24\) .* on 1 of 4.*row 1 \(a:1\)"):
        check_faulty(scores, 0.24)


def test_an_error_without_text_is_named_inline(run):
    scores = score_in_process(run_inline, "fragile", "1", "no text", "2")
    np.testing.assert_array_equal(scores.rewards, np.float32([1.0, np.nan, 2.0]))
    assert "failed on row 1 (a:1): Textless: it has no text" in scores.first_fault


def test_its_memory_ends_at_half_of_the_machines(run):
    limit = score_in_process(run, "memory_limit", "1").rewards[0]
    assert limit == pytest.approx(0.5, abs=1e-6)


def test_a_function_that_always_crashes_is_given_up(run):
    start = time.monotonic()
    with pytest.raises(ConfigError, match="fragile must not end its process"):
        score_in_process(run, "fragile", *["crash"] * 500)
    assert time.monotonic() - start < 20.0


def test_a_function_that_forks_shifts_no_answer(run):
    for _ in range(2):
        scores = score_in_process(run, "forks", "1", "fork", "2", "3", "fork", "4")
        assert scores.rewards.tolist() == [1.0, 7.0, 2.0, 3.0, 7.0, 4.0]


def test_an_answer_of_another_process_is_refused(fresh_run, tmp_path, monkeypatch):
    """The protocol's own check, where a copy answers all the same."""
    monkeypatch.setattr(fresh_run, "_n_requests", 0)
    score_in_process(fresh_run, "forks", "1")
    fresh_run._child = SimpleNamespace(pid=-1, wait=fresh_run._child.wait)
    with pytest.raises(ConfigError, match="must answer each call once, in its own process"):
        score_in_process(fresh_run, "forks", "1")


def test_what_a_function_prints_controls_no_terminal(fresh_run, capfd):
    score_in_process(fresh_run, "writes", "hello")
    deadline, output = time.monotonic() + 10, ""
    while "hello" not in output and time.monotonic() < deadline:
        output += capfd.readouterr().out
        time.sleep(0.01)
    assert "hello" in output and "\x1b" not in output


def test_an_error_returns_its_kind_row_and_traceback(run):
    with pytest.raises(KeyError, match="key") as caught:
        score_in_process(run, "raises", "key")
    row, trace = caught.value.__notes__
    assert "raises raised this on row 0 (a:0)" in row and "worker_rewards.py" in trace
    with pytest.raises(RuntimeError, match="Odd: 1"):  # one that cannot be rebuilt here
        score_in_process(run, "raises", "other")


def test_what_cannot_be_sent_says_what_to_set(run, monkeypatch):
    with pytest.raises(Exception, match="pickle"):
        score_in_process(run, "unsendable", "1")
    assert score_in_process(run, "generates", "1", "2").rewards.tolist() == [1.0, 1.0]
    sample = Sample(0, Row("q", "4", columns={"f": lambda: 1}), ParsedResponse("1"), [1])
    reward = read_rewards("worker_rewards:generates", ["f"])
    with pytest.raises(ConfigError, match="can be sent .*Set data.reward_timeout_s=0|--set data"):
        score_samples(reward, [sample], run=run)
    monkeypatch.setattr(sys.modules["worker_rewards"], "local", lambda response: 1.0, raising=False)
    with pytest.raises(ConfigError, match="local must be importable in the separate process"):
        score_in_process(run, "local", "1")


def test_a_function_without_import_is_tried_once(fresh_run, monkeypatch):
    score_in_process(fresh_run, "counts", "1")
    before = fresh_run._n_requests
    monkeypatch.setattr(sys.modules["worker_rewards"], "local", lambda response: 1.0, raising=False)
    with pytest.raises(ConfigError, match="local must be importable in the separate process"):
        score_in_process(fresh_run, "local", *"12345678")
    assert fresh_run._n_requests == before + 1


def test_what_a_late_function_started_ends_with_it(fresh_run, tmp_path, monkeypatch):
    file = tmp_path / "child"
    monkeypatch.setenv("CHILD_FILE", str(file))
    assert np.isnan(score_in_process(fresh_run, "spawns", "1").rewards[0])
    child = int(file.read_text())

    def has_ended():
        try:
            return psutil.Process(child).status() == "zombie"
        except psutil.NoSuchProcess:
            return True

    deadline = time.monotonic() + 10  # the kernel ends it a moment after the signal
    while not has_ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended()


def test_no_process_is_left_behind(fresh_run, tmp_path):
    pid = int(score_in_process(fresh_run, "where", "1").rewards[0])
    second = RewardProcess(5.0)
    second_pid = int(score_in_process(second, "where", "1").rewards[0])
    del second
    gc.collect()
    assert not psutil.pid_exists(second_pid) and psutil.pid_exists(pid)
    fresh_run.close()
    assert not psutil.pid_exists(pid)


def test_a_killed_trainer_leaves_no_function_running(folder):
    script = textwrap.dedent("""
        import os, signal, threading
        from jaxmoe.rewards.reward_process import RewardProcess
        run = RewardProcess(600.0)
        (outcome,) = run("f", "worker_rewards:where", {}, None, [{"response": ""}], ["row"])
        print(outcome[1], flush=True)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        run("f", "worker_rewards:hangs", {}, None, [{"response": "hang"}], ["row"])
    """)
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
    )
    assert result.returncode == -9 and "Traceback" not in result.stderr
    deadline = time.monotonic() + 20.0
    while psutil.pid_exists(int(result.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(result.stdout))
