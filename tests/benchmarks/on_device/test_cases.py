# SPDX-License-Identifier: Apache-2.0
"""The stage of the kernels' cases: each in one group, none twice, each verdict at once."""

import contextlib
import json
import subprocess
import sys

import pytest

from benchmarks.on_device import cases
from benchmarks.on_device.cases import GROUPS, OTHER_ROWS, REHEARSAL, Case, list_cases, order_group
from tests.pallas_kernels import test_on_chip


def count_gpu_tests():
    """How many tests of test_on_chip.py have the mark of a GPU."""
    count = 0
    for test in vars(test_on_chip).values():
        for mark in getattr(test, "pytestmark", ()):
            params = mark.args[1] if mark.name == "parametrize" else ()
            count += sum("gpu" in {m.name for m in getattr(x, "marks", ())} for x in params)
    return count


def test_the_groups_have_every_case_of_a_gpu_once():
    every = list_cases()
    grouped = [name for group in GROUPS for name in order_group(every, group, set())]
    assert sorted(grouped) == sorted(every) and len(every) == count_gpu_tests() > 250
    assert {name for name, case in every.items() if case.group == "right"} == cases.RIGHT
    invariant = order_group(every, "invariant", set())
    assert invariant[0] == OTHER_ROWS and every[invariant[1]].size == 1
    assert all(x.endswith("mosaic_gpu_invariant") for x in invariant[1:])
    assert {every[x].size for x in order_group(every, "real", set())} == {1, 2}
    assert all(x.endswith("triton") for x in order_group(every, "triton", set()))


def test_what_the_campaign_has_as_right_is_not_run_again(tmp_path):
    first, second, third = order_group(list_cases(), "real", set())[:3]
    figures = [
        {"case": first, "verdict": "right"},
        {"case": second, "verdict": "wrong"},
        {"group": "real", "right": 1},
    ]
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"figures": figures}) + '\n{"stage": "other"}\n{"figures": [{"ca')
    done = cases.read_done([path])
    assert done == {first} and cases.read_done([]) == set()
    assert order_group(list_cases(), "real", done)[:2] == [second, third]


@pytest.mark.slow
def test_a_rehearsal_runs_what_is_not_done_in_processes_and_reports_each(capfd, tmp_path):
    done = tmp_path / "results.jsonl"
    figures = [{"case": REHEARSAL[1], "verdict": "right"}]
    done.write_text(json.dumps({"figures": figures}))
    assert cases.main(["--platform", "cpu", "--workers", "2", "--done", str(done)]) == 0
    lines = [x for x in capfd.readouterr().out.splitlines() if x.startswith(cases.MARK)]
    *each, total = [json.loads(x.removeprefix(cases.MARK)) for x in lines]
    assert {x["case"] for x in each} == {REHEARSAL[0], REHEARSAL[2]}
    assert {x["verdict"] for x in each} == {"right"} and all(x["seconds"] > 0 for x in each)
    assert (total["cases"], total["right"]) == (2, 2)


WORKER = """
import json, os, sys
for name in sys.stdin:
    if name.startswith("dies"):
        os._exit(7)
    verdict = "error" if name.startswith("raises") else "right"
    print("noise of a library")
    figures = {"case": name.strip(), "verdict": verdict, "pid": os.getpid()}
    print("figures " + json.dumps(figures), flush=True)
"""


def test_a_worker_that_died_or_raised_is_replaced_and_no_case_is_lost(monkeypatch, capfd):
    monkeypatch.setattr(
        cases,
        "_start_worker",
        lambda _: subprocess.Popen(
            [sys.executable, "-c", WORKER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ),
    )
    names = ["a", "b", "raises", "c", "dies", "d"]
    assert cases.run_cases(names, "cpu", 1) == {"right": 4, "wrong": 0, "refused": 0, "error": 2}
    lines = [x for x in capfd.readouterr().out.splitlines() if x.startswith(cases.MARK)]
    told = {x["case"]: x for x in (json.loads(y.removeprefix(cases.MARK)) for y in lines)}
    assert list(told) == names and told["dies"]["message"] == "the process ended with status 7"
    assert told["a"]["pid"] == told["b"]["pid"] == told["raises"]["pid"] != told["c"]["pid"]
    assert told["c"]["pid"] != told["d"]["pid"]


@pytest.mark.parametrize(
    "raised, size, verdict",
    [
        (None, 0, ("right", "")),
        (NotImplementedError("head size 16"), 0, ("refused", "head size 16")),
        (pytest.skip.Exception("it needs gpu"), 0, ("refused", "it needs gpu")),
        (ValueError("odd"), 0, ("error", "ValueError: odd")),
        (MemoryError("full"), 0, ("error", "MemoryError: full")),
        (MemoryError("full"), 2, ("refused", "it needs more memory: MemoryError: full")),
    ],
)
def test_a_case_has_a_verdict_and_for_want_of_memory_the_device_alone(
    monkeypatch, raised, size, verdict
):
    held = []

    def hold(name):
        held.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(cases, "device_shared", lambda: hold("shared"))
    monkeypatch.setattr(cases, "device_alone", lambda: hold("alone"))
    monkeypatch.setattr(cases.one, "is_out_of_memory", lambda e: isinstance(e, MemoryError))

    def run(hold_device):
        with hold_device():
            if raised:
                raise raised

    assert cases.judge_case(Case("rest", size, run)) == verdict
    assert held == (["shared", "alone"] if isinstance(raised, MemoryError) else ["shared"])


def test_a_fault_is_wrong_and_a_failed_test_too(monkeypatch):
    assert cases.judge_case(Case("rest", 0, lambda _: "o: relative error 1")) == (
        "wrong",
        "o: relative error 1",
    )
    monkeypatch.setattr(cases.jax, "default_backend", lambda: "gpu")
    failing = cases._call(_fail, "rows differ")
    assert cases.judge_case(Case("rest", 0, failing)) == ("wrong", "rows differ")


def _fail(message):
    raise AssertionError(message)
