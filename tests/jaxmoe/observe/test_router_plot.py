# SPDX-License-Identifier: Apache-2.0
"""The heat map of the router: what is drawn, and lines of any kind in layers.jsonl."""

import json

import numpy as np
import pytest
from hostile_values import VALUES, places, replaced
from matplotlib.image import imread

from jaxmoe.observe.metrics import MetricsLog, read_samples
from jaxmoe.observe.router_plot import TITLES, plot_router, read_layers


def make_rows(steps, layers=3):
    return [
        {"stage": "rl", "step": s} | {n: [0.1 * s + i for i in range(layers)] for n in TITLES}
        for s in steps
    ]


@pytest.mark.parametrize(
    "rows",
    [[], make_rows([1]), make_rows(range(1, 30)), make_rows([2, 5])],
    ids=["empty", "one step", "many steps", "steps apart"],
)
def test_the_heat_map_is_a_picture(tmp_path, rows):
    plot_router(rows, tmp_path)
    image = imread(tmp_path / "plots" / "router.png")
    assert image.shape[1] >= 1000 and image.std() > 0.01


def test_a_panel_has_values_by_step_and_layer():
    rows = make_rows([3, 1]) + [{"stage": "warmup", "step": 1, "entropy": [9.0, 9.0, 9.0]}]
    steps, values = read_layers([*rows, {"stage": "rl", "step": 2, "entropy": [1.0]}], "entropy")
    assert steps.tolist() == [1.0, 3.0]
    np.testing.assert_allclose(values, [[0.1, 1.1, 2.1], [0.3, 1.3, 2.3]])


def test_layers_are_lines_with_unique_steps_after_resume(tmp_path):
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write_layers("rl", 1, {})
        assert not (tmp_path / "layers.jsonl").exists()  # a run without instruments has no file
        for step in (1, 2, 3):
            log.write_layers("rl", step, {"entropy": [1.0, float(step)]})
    with MetricsLog(tmp_path, stage="rl", step=2) as log:
        log.write_layers("rl", 3, {"entropy": [0.5, 0.5]})
    rows = read_samples(tmp_path / "layers.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["entropy"] == [0.5, 0.5]
    with MetricsLog(tmp_path, stage="warmup", step=0):
        pass
    assert read_samples(tmp_path / "layers.jsonl") == []


def test_only_the_first_process_writes(tmp_path):
    with MetricsLog(tmp_path / "run", stage="rl", step=0, enabled=False) as log:
        log.write_layers("rl", 1, {"entropy": [1.0]})
    assert not (tmp_path / "run").exists()


def test_any_line_is_drawn_or_skipped(tmp_path):
    file = tmp_path / "layers.jsonl"
    (row,) = make_rows([4])
    changes = [(path, value) for path in places(row) for value in VALUES]
    lines = [replaced(row, *changes[i]) for i in np.random.default_rng(0).permutation(len(changes))]
    file.write_text("\n".join([*lines[:200], json.dumps(row)]) + "\n")
    rows = read_samples(file)
    assert len(rows) > 50
    plot_router(rows, tmp_path)
