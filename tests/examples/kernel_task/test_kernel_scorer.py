# SPDX-License-Identifier: Apache-2.0
"""The reward of a kernel: what is refused before a run, what is counted, and what speed earns."""

import ast
import asyncio
import builtins
import json
import math

import kernel_scorer
import numpy as np
import pytest
from kernel_ranking import KERNELS, is_ranked, rank_once
from kernel_rows import list_kernel_rows, make_kernel_row
from kernel_rules import BUILTIN_NAMES, find_refusals
from kernel_scorer import check_kernel_task, read_matrices, score_kernel
from kernel_timing import KernelMeasurement, KernelStatus, draw_matrices

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Row
from jaxmoe.graders import code_scorer
from tests.jaxmoe.sandbox.kinds import BrokenLauncher, first_kind, open_sandbox

ROW = make_kernel_row((36, 40, 44))


def refused(code):
    return set(find_refusals(ast.parse(code)))


@pytest.mark.parametrize("name", KERNELS)
def test_honest_kernels_are_not_refused(name):
    assert not find_refusals(ast.parse(KERNELS[name]))


def test_names_that_a_kernel_needs_are_not_refused():
    assert not refused("def matmul(A, B): return [sum(map(int.__mul__, r, c)) for r, c in A]")
    assert not refused("if __name__ == '__main__':\n    print(1)")
    assert not refused("def matmul(A, B):\n    id, input, _ = A, B, 3\n    return id + input")
    assert not refused("def f(time, open): return open + time")


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("import math", {"imports_refused"}),
        ("from typing import List", {"imports_refused"}),
        ("from __future__ import annotations", {"imports_refused"}),
        ("def f():\n    import time as t", {"imports_refused", "timers_touched"}),
        ("from os import path", {"imports_refused", "files_touched"}),
        ("x.perf_counter = 0", {"timers_touched"}),
        ("open('a')", {"files_touched", "hidden_names"}),
        ("__import__('os')", {"imports_refused", "hidden_names"}),
        ("().__class__", {"hidden_names"}),
        ("__builtins__", {"hidden_names"}),
        ("def __build_class__(): pass", {"hidden_names"}),
        ("def f(__debug): pass", {"hidden_names"}),
        ("g.gi_frame", {"hidden_names"}),
        ("x.f_back", {"hidden_names"}),
        ("'{0.x}'.format_map(y)", {"hidden_names"}),
        ("eval('1')", {"hidden_names"}),
        ("getattr(x, 'y')", {"hidden_names"}),
        ("class A: pass", {"hidden_names"}),
        ("match x:\n    case list(__class__=y): pass", {"hidden_names"}),
        ("def f():\n    global __builtins__", {"hidden_names"}),
        ("f'{x.__class__}'", {"hidden_names"}),
    ],
)
def test_code_is_refused_by_kind(code, kinds):
    assert refused(code) == kinds


def test_builtins_of_kernels_exist_and_reach_no_attributes():
    assert all(hasattr(builtins, name) for name in BUILTIN_NAMES)
    reaching = {"getattr", "setattr", "vars", "type", "object", "eval", "exec", "__import__"}
    assert not reaching & set(BUILTIN_NAMES)


def test_the_product_is_exact_and_holds_the_extremes():
    sizes, bound = (3, 40, 4), 10**8
    matrices = draw_matrices(sizes, bound, np.random.default_rng(0))
    a, b = json.loads(matrices.factors)
    columns = list(zip(*b, strict=True))
    exact = [[sum(x * y for x, y in zip(r, c, strict=True)) for c in columns] for r in a]
    assert matrices.product == json.dumps(exact)
    entries = [x for row in exact for x in row]
    assert max(entries) > 25 * bound**2 and min(entries) < -25 * bound**2  # of 40 at most


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"sizes": [4, 4, 4]},
        {"sizes": [4, 4], "bound": 9},
        {"sizes": "444", "bound": 9},
        {"sizes": [4, 4, 1], "bound": 9},
        {"sizes": [4, 4, True], "bound": 9},
        {"sizes": [4, 4, 4.0], "bound": 9},
        {"sizes": [4, 4, 4], "bound": 0},
        {"sizes": [4, 4, 4], "bound": None},
        {"sizes": [4, 4, 4], "bound": 2**32},
        {"sizes": [400, 400, 400], "bound": 9},
    ],
)
def test_rows_without_matrices_are_refused(columns):
    with pytest.raises(ConfigError, match="score_kernel needs .* Write rows such as"):
        read_matrices(columns)
    with pytest.raises(ConfigError, match=r"a.jsonl:3: score_kernel needs"):
        check_kernel_task([Row("q", None, columns=columns, location="a.jsonl:3")])


@pytest.mark.parametrize(
    "option",
    [
        {"repetitions": 0},
        {"repetitions": 2.0},
        {"repetitions": True},
        {"timeout_s": 0},
        {"timeout_s": math.inf},
        {"timeout_s": math.nan},
        {"timeout_s": "9"},
        {"max_speedup": 1},
        {"max_speedup": math.nan},
        {"correct_share": 1.0},
        {"correct_share": -0.1},
    ],
)
def test_options_by_which_nothing_is_measured_are_refused(option):
    with pytest.raises(ConfigError, match=rf"score_kernel\({next(iter(option))}=…\) must be"):
        check_kernel_task([], **option)
    check_kernel_task([Row("q", None, columns=ROW)])


def score(response, **options):
    return asyncio.run(score_kernel(ROW["prompt"], response, ROW, **options))


@pytest.mark.parametrize(
    ("speedup", "expected"), [(0.5, 0.1), (1.0, 0.1), (2.0, 0.4), (8.0, 1.0), (99.0, 1.0)]
)
def test_each_doubling_of_the_speed_earns_the_same(monkeypatch, speedup, expected):
    first_kind()
    measured = KernelMeasurement(KernelStatus.CORRECT, "", speedup)
    monkeypatch.setattr(kernel_scorer, "measure_kernel", lambda *args, **options: measured)
    parts = score(KERNELS["triple loop"], max_speedup=8.0)
    assert parts["score"] == pytest.approx(expected) and parts["speedup"] == speedup


def test_outcomes_have_equal_parts_except_the_speedup():
    first_kind()
    failed = score("def matmul(A, B): return A", repetitions=1)
    passed = score(KERNELS["columns first"], repetitions=1)
    none = score("I cannot.")
    assert set(failed) == set(none) == set(passed) - {"speedup"}
    assert all(type(name) is str for name in passed)
    for parts, part in ((failed, "incorrect"), (passed, "correct"), (none, "no_code")):
        counts = {k: v for k, v in parts.items() if k not in ("score", "speedup")}
        assert [name for name, count in counts.items() if count] == [part]


def test_an_answer_without_a_sandbox_has_no_reward(monkeypatch):
    fields = {"kind": first_kind(), "disk_mb": 0, "warm": 2}
    monkeypatch.setattr(code_scorer, "choose_sandbox", lambda c: BrokenLauncher(c.kind, c))
    lost = score(KERNELS["triple loop"], sandbox=fields)
    assert lost["score"] is None and lost["no_sandbox"] == 1.0 and lost["timeout"] == 0.0


def test_the_time_of_threads_is_counted():
    """The first thread only waits here; by its own time the work would be free."""
    code = """
import threading
def work():
    x = 0
    for i in range(5_000_000):
        x += i
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    with open_sandbox("unsafe_local") as sandbox:
        before = sandbox.read_cpu_s()
        assert not sandbox.run(code, 60.0).error
        assert sandbox.read_cpu_s() - before > 0.05


def test_faster_kernels_are_ranked_higher():
    first_kind()
    speedups = rank_once(kernel_scorer.open_pool_of_run(None), (56, 60, 64), repetitions=5)
    assert is_ranked(speedups), speedups


def test_a_row_names_its_sizes_and_bound():
    for row in list_kernel_rows():
        (n, k, m), bound = read_matrices(row)
        assert len({n, k, m}) == 3
        assert all(f" {x} " in row["prompt"] for x in (n, k, m)) and f"{bound}." in row["prompt"]


@pytest.mark.parametrize("sizes", [[2000, 2, 2000], [112_000, 2, 2]])
def test_matrices_beyond_the_message_limits_are_refused(sizes):
    with pytest.raises(ConfigError, match="factors and a product of at most 900,000 characters"):
        read_matrices({"sizes": sizes, "bound": 9})
    assert read_matrices({"sizes": [64, 72, 80], "bound": 100})


def test_a_local_named_like_a_clock_is_allowed():
    assert find_refusals(ast.parse("def matmul(A, B):\n    monotonic = 1\n    return A")) == {}
