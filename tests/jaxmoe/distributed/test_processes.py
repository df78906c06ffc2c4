# SPDX-License-Identifier: Apache-2.0
"""Processes of one run: they meet, agree, share work, end together, and go on as others.

JAXMOE_FAULTS=10 kills one of four so often, each time another one at another moment (-s says when
and how far the metrics are off); each kill costs the compilation of two runs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from process_environ import free_port, make_environ, run_together

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.distributed import processes
from jaxmoe.distributed.channel import Channel
from jaxmoe.distributed.processes import (
    PROCESS_VARIABLES,
    check_one_process,
    check_same_everywhere,
    gather_from_processes,
    gather_to_hosts,
    join_processes,
    map_shares,
    max_over_processes,
)
from jaxmoe.observe.metrics import read_metrics

ROOT = Path(__file__).parents[3]


def test_one_process_meets_nobody_and_agrees_with_itself():
    join_processes({})
    join_processes(make_environ(count="1", number="0"))
    assert not jax.distributed.is_initialized()
    check_same_everywhere(config="a")
    assert gather_from_processes({"a": 1}) == [{"a": 1}] and max_over_processes(3) == 3
    assert map_shares([1, 2, 3], sum) == [6]
    assert gather_to_hosts(jax.numpy.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("environ", "output"),
    [
        ({PROCESS_VARIABLES[0]: "127.0.0.1:1"}, "JAX_NUM_PROCESSES=nothing"),
        (make_environ(address="nowhere"), "JAX_COORDINATOR_ADDRESS='nowhere'"),
        (make_environ(count="two"), "JAX_NUM_PROCESSES='two'"),
        (make_environ(number="2"), r"JAX_PROCESS_ID \(2\) must be below JAX_NUM_PROCESSES \(2\)"),
    ],
)
def test_variables_that_cannot_be_are_one_line(environ, output):
    with pytest.raises(ConfigError, match=output) as error:
        join_processes(environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "environ", [{PROCESS_VARIABLES[1]: "2"}, {processes.FIND_VARIABLE: "auto"}]
)
def test_what_one_process_writes_is_refused_to_several(environ):
    check_one_process("export", {})
    check_one_process("export", make_environ(count="1", number="0"))
    with pytest.raises(ConfigError, match="jaxmoe.export must run as one process.*Try env -u"):
        check_one_process("export", environ)


def test_a_silent_first_process_is_one_line(monkeypatch):
    monkeypatch.setattr(processes, "START_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match="nothing answered for 0.1 s .*Start process 0"):
        join_processes(make_environ(address=f"127.0.0.1:{free_port()}"))


def as_three(monkeypatch, number, other_values):
    """Act as process `number` of three, where the others have these values."""

    class Three(Channel):
        def gather_values(self, value):
            return [value if i == number else other_values[i] for i in range(3)]

    channel = Three("three", number=number, count=3)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    monkeypatch.setattr(processes.jax, "process_index", lambda: number)
    monkeypatch.setattr(processes.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "_open_channel", lambda: channel)


def test_differences_between_processes_are_named_by_process(monkeypatch):
    values = {"config": "lr 1\nseed 2", "code": "abc"}
    as_three(monkeypatch, 0, {1: values, 2: values | {"config": "lr 1\nseed 3"}})
    with pytest.raises(ConfigError, match="config .* in 2: 'seed 3' and not 'seed 2'"):
        check_same_everywhere(**values)


def test_shares_are_contiguous_and_complete(monkeypatch):
    shares = []
    for number in range(3):
        as_three(monkeypatch, number, {i: {"value": None} for i in range(3)})
        map_shares(list(range(14)), shares.append, group_size=2)
    assert [x for share in shares for x in share] == list(range(14))
    assert all(len(share) % 2 == 0 for share in shares)


def test_an_error_in_one_process_ends_all(monkeypatch):
    broken = {"error": '["EngineError", 2, "ValueError: no"]'}
    as_three(monkeypatch, 0, {1: {"value": 1}, 2: broken})
    with pytest.raises(EngineError, match="process 2: ValueError: no"):
        map_shares([1, 2, 3], sum)
    as_three(monkeypatch, 2, {0: {"value": 1}, 1: {"value": 1}})
    with pytest.raises(ZeroDivisionError):
        map_shares([1, 2, 3], lambda share: 1 // 0)


SMALL = {
    "model.d_model": 32,
    "model.d_expert": 24,
    "model.n_q_heads": 4,
    "model.n_kv_heads": 2,
    "data.train_rows": 64,
    "data.held_out_rows": 6,
    "warmup.steps": 3,
    "warmup.sequences_per_step": 16,
    "rollout.sequences_per_step": 16,
    "rollout.samples_per_prompt": 4,
    "steps": 4,
    "eval.every_steps": 4,
    "save.every_steps": 1,
    "data.rewards": "early_letters:share",
}
# so few steps learn no task, and where all answers are scored alike a step changes nothing
REWARD = """
def share(prompt, response, row):
    return sum("a" <= letter <= "m" for letter in response) / 6
"""


def start_processes(work, count, devices, module="train", options=(), **mesh):
    """The processes of one command, and where each writes."""
    changes = SMALL | {f"mesh.{axis}": n for axis, n in mesh.items()} | dict(options)
    sets = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    typed = [
        sys.executable,
        "-m",
        f"jaxmoe.{module}",
        "--config",
        "tiny.py",
        "--workdir",
        str(work),
    ]
    address, started = f"127.0.0.1:{free_port()}", []
    (work.parent / "early_letters.py").write_text(REWARD)
    outputs = os.pathsep.join(filter(None, (str(work.parent), os.environ.get("PYTHONPATH"))))
    for number in range(count):
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            **make_environ(address, str(count), str(number)),
            "PYTHONPATH": outputs,
        }
        if count > 1:  # jax keeps programs for process 0 alone, which then waits 30 s for others
            env.pop("JAX_COMPILATION_CACHE_DIR", None)
        log = open(work.parent / f"{work.name}-{number}.txt", "a+")
        command = [*typed, *sets]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        started.append((process, log))
    return started


def wait_for_end(started, timeout_s):
    """Exit statuses and what was written, once all have ended."""
    deadline, outputs = time.monotonic() + timeout_s, []
    for process, log in started:
        code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        log.seek(0)
        outputs.append((code, log.read()))
        log.close()
    return outputs


MINUTES = 1200  # s: of four processes that compile, beside others
KILLS = int(os.environ.get("JAXMOE_FAULTS", "1"))


def pick_learned(row):
    """The numbers of a line that are no clock's."""
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
    return {k: v for k, v in numbers.items() if not k.startswith("time/") and "_per_s" not in k}


def read_rows_by_step(work):
    rows = read_metrics(work / "metrics.jsonl")
    return {(row["stage"], row["step"]): row for row in rows}


def is_overloaded(outputs):
    """Return True if gloo, which waits 30 s for the first collective, gave up on a start."""
    return any("Gloo context initialization failed" in output for _, output in outputs)


def run_to_end(work, count, devices, **mesh):
    """The lines of a run to its end, started again where this machine was too slow for gloo."""
    for _ in range(3):
        outputs = wait_for_end(start_processes(work, count, devices, **mesh), MINUTES)
        if all(code == 0 for code, _ in outputs):
            return read_rows_by_step(work)
        assert is_overloaded(outputs), outputs
    raise AssertionError(outputs)


def start_and_wait(work, step):
    """Four processes that have come to line `at`, started again as above."""
    for _ in range(3):
        started = start_processes(work, 4, 2, fsdp=4, tensor=2)
        while step not in read_rows_by_step(work) and started[0][0].poll() is None:
            time.sleep(0.05)
        if step in read_rows_by_step(work):
            return started
        outputs = wait_for_end(started, 60)
        assert is_overloaded(outputs), outputs
    raise AssertionError(outputs)


def kill_and_resume(work, kill, want):
    """A run of four of which one dies, gone on with by two on another mesh; how far it is off.

    Before the death it is the same program, so the same bits; after it other sums in other orders.
    """
    dice = random.Random(kill)
    step, victim, wait = ("rl", dice.randint(1, 3)), dice.randrange(4), dice.uniform(0, 1)
    started = start_and_wait(work, step)
    time.sleep(wait)  # so that a save, a rollout or the next step is cut
    started[victim][0].send_signal(signal.SIGKILL)
    outputs = wait_for_end(started, 60)
    assert all(code != 0 for code, _ in outputs)
    errors = [output for i, (_, output) in enumerate(outputs) if i != victim]
    cause = f"Task {victim}" if victim else "leader task"  # of process 0 the service dies too
    assert any(
        f"lost the connection to process {victim}:" in output or cause in output
        for output in errors
    ), errors
    for key, row in read_rows_by_step(work).items():
        assert pick_learned(row) == pick_learned(want[key]), key
    rows = run_to_end(work, 2, 4, fsdp=2, expert=4)
    assert rows.keys() == want.keys()
    differences = {
        (key, name): abs(value - pick_learned(want[key])[name]) / max(1.0, abs(value))
        for key, row in rows.items()
        for name, value in pick_learned(row).items()
    }
    worst = max(differences, key=lambda x: differences[x])
    print(
        f"kill {kill}: process {victim}, {wait:.2f} s after {step}: off by "
        f"{differences[worst]:.1e}, {worst}"
    )
    return differences


def read_final(work):
    """The lines of the run that nobody kills, whose steps change something."""
    want = run_to_end(work, 4, 2, fsdp=4, tensor=2)
    steps = [row for (stage, step), row in want.items() if stage == "rl" and step]
    assert len(steps) == 4 and all(row["grad/norm"] > 0 for row in steps)
    return want


@pytest.mark.slow
@pytest.mark.extended  # four processes that compile a run each, three times
@pytest.mark.timeout(2 * MINUTES * (1 + KILLS))
def test_a_dead_process_ends_all(tmp_path):
    want = read_final(tmp_path / "whole")
    for kill in range(KILLS):
        differences = kill_and_resume(tmp_path / f"killed{kill}", kill, want)
        # the square of an answer's ratio: an error of a log-prob comes in twice a token
        room = {key: 1e-6 * (2 * 6 if "chi2_seq" in key[1] else 1) for key in differences}
        assert all(differences[key] < room[key] for key in differences), {
            k: x for k, x in differences.items() if x > 1e-6
        }


def supervised_steps(count, steps, axis, *changes):
    """Return the output of process 0 of `count`, after such steps on two devices."""
    typed = ["-m", "tests.jaxmoe.parallel.supervised_steps", str(steps), axis, *changes]
    ends = run_together(typed, count, 2 // count, MINUTES)
    assert all(code == 0 for code, *_ in ends), ends
    return json.loads(ends[0][1].splitlines()[-1])


@pytest.mark.slow  # two processes and one; tiny.py's own sizes, whose messages gloo got wrong
@pytest.mark.timeout(2 * MINUTES)
@pytest.mark.parametrize("changes", [(), ("quant.experts=mxfp4",)], ids=["dense", "mxfp4"])
def test_two_processes_take_the_supervised_steps_of_one(changes):
    want, actual = (supervised_steps(count, 20, "fsdp", *changes) for count in (1, 2))
    assert len(want) == 20 and min(min(step) for step in want) > 0
    np.testing.assert_allclose(actual, want, rtol=1e-6)


@pytest.mark.slow  # two processes
def test_a_signal_at_one_saves_at_all(tmp_path):
    work = tmp_path / "run"
    started = start_processes(work, 2, 1, fsdp=2)
    while ("rl", 1) not in read_rows_by_step(work):
        assert started[0][0].poll() is None, wait_for_end(started, 60)
        time.sleep(0.05)
    started[1][0].send_signal(signal.SIGTERM)
    outputs = wait_for_end(started, 240)
    assert [code for code, _ in outputs] == [143, 143], outputs
    saved = max(step for _, step in [key for key in read_rows_by_step(work) if key[0] == "rl"])
    assert f"saved rl step {saved}" in outputs[0][1]
    assert np.isfinite(read_rows_by_step(work)["rl", saved]["loss"])
