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


def test_the_groups_have_every_gpu_case_once():
    all_cases = list_cases()
    grouped = [name for group in GROUPS for name in order_group(all_cases, group, set())]
    assert sorted(grouped) == sorted(all_cases) and len(all_cases) == count_gpu_tests() > 250
    assert {name for name, case in all_cases.items() if case.group == "right"} == cases.RIGHT
    invariant = order_group(all_cases, "invariant", set())
    assert invariant[0] == OTHER_ROWS and all_cases[invariant[1]].size == 1
    assert all(x.endswith("mosaic_gpu_invariant") for x in invariant[1:])
    assert {all_cases[x].size for x in order_group(all_cases, "real", set())} == {1, 2}
    assert all(x.endswith("triton") for x in order_group(all_cases, "triton", set()))


def test_cases_already_right_are_not_repeated(tmp_path):
    first, second, third = order_group(list_cases(), "real", set())[:3]
    figures = [
        {"case": first, "verdict": "right"},
        {"case": second, "verdict": "wrong"},
        {"group": "real", "right": 1},
    ]
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"figures": figures}) + '\n{"stage": "other"}\n{"figures": [{"ca')
    results = cases.read_done([path])
    assert results == {first} and cases.read_done([]) == set()
    assert order_group(list_cases(), "real", results)[:2] == [second, third]


@pytest.mark.slow
def test_a_rehearsal_runs_and_reports_each_open_case(capfd, tmp_path):
    results = tmp_path / "results.jsonl"
    figures = [{"case": REHEARSAL[1], "verdict": "right"}]
    results.write_text(json.dumps({"figures": figures}))
    assert cases.main(["--platform", "cpu", "--workers", "2", "--done", str(results)]) == 0
    lines = [x for x in capfd.readouterr().out.splitlines() if x.startswith(cases.MARK)]
    *reports, total = [json.loads(x.removeprefix(cases.MARK)) for x in lines]
    assert {x["case"] for x in reports} == {REHEARSAL[0], REHEARSAL[2]}
    assert {x["verdict"] for x in reports} == {"right"} and all(x["seconds"] > 0 for x in reports)
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


def test_a_dead_worker_is_replaced_without_losing_cases(monkeypatch, capfd):
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
    verdicts = {x["case"]: x for x in (json.loads(y.removeprefix(cases.MARK)) for y in lines)}
    assert (
        list(verdicts) == names and verdicts["dies"]["message"] == "the process ended with status 7"
    )
    assert (
        verdicts["a"]["pid"]
        == verdicts["b"]["pid"]
        == verdicts["raises"]["pid"]
        != verdicts["c"]["pid"]
    )
    assert verdicts["c"]["pid"] != verdicts["d"]["pid"]


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
def test_memory_errors_repeat_a_case_alone(monkeypatch, raised, size, verdict):
    locks = []

    def hold(name):
        locks.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(cases, "device_shared", lambda: hold("shared"))
    monkeypatch.setattr(cases, "device_alone", lambda: hold("alone"))
    monkeypatch.setattr(cases.one, "is_out_of_memory", lambda e: isinstance(e, MemoryError))

    def run(hold_device):
        with hold_device():
            if raised:
                raise raised

    assert cases.judge_case(Case("rest", size, run)) == verdict
    assert locks == (["shared", "alone"] if isinstance(raised, MemoryError) else ["shared"])


def test_a_fault_and_a_failed_test_are_wrong(monkeypatch):
    assert cases.judge_case(Case("rest", 0, lambda _: "o: relative error 1")) == (
        "wrong",
        "o: relative error 1",
    )
    monkeypatch.setattr(cases.jax, "default_backend", lambda: "gpu")
    failing = cases._call(_fail, "rows differ")
    assert cases.judge_case(Case("rest", 0, failing)) == ("wrong", "rows differ")


def _fail(message):
    raise AssertionError(message)
