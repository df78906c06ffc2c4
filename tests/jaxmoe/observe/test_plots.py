# SPDX-License-Identifier: Apache-2.0
"""Pictures: they exist, they are not blank, and no metric is required."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxmoe.observe import plots
from jaxmoe.observe.plots import PANELS, plot_run, smooth_values


def _rows(count: int) -> list[dict]:
    return [
        {
            "stage": "rl",
            "step": n,
            "reward/mean": n / 60,
            "policy/entropy": 1.0,
            "grad/norm": 0.3,
            "eval/accuracy": None if n % 5 else n / 60,
            "train_rollout_logprob_abs_diff": 0.0,
            "train_rollout_logprob_abs_diff_max": 0.0,
            "reward/zero_std_groups_frac": 0.5,
            "stop/max_tokens_frac": 0.2,
            "response_len/mean": 5.0,
            "response_len/max": 6,
            "policy/clip_frac": 0.1,
            "policy/clip_frac_high": 0.06,
            "policy/clip_frac_low": 0.04,
            "policy/kl_ref": 0.01,
            "eval/pass@2": 0.5,
            "eval/pass@8": 0.9,
            "time/step_s": 1.5,
            "time/rollout_s": 1.0,
            "time/train_s": 0.5,
        }
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [[], [{"stage": "rl", "step": 1}], _rows(1), _rows(60)],
    ids=["empty", "no metrics", "one step", "sixty steps"],
)
def test_every_panel_is_a_picture(tmp_path, rows):
    plot_run(rows, tmp_path)
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {f"{name}.png" for name in PANELS} | {"overview.png"}
    image = imread(tmp_path / "plots" / "overview.png")
    assert image.shape[1] >= 1200 and image.std() > 0.01


@pytest.mark.parametrize(
    "values",
    [[-0.9, -0.5, -0.25], [3.0, 9.0, 25.0], [-40.0, 0.5, 12.0], [0.1, 0.5, 0.9]],
    ids=["negative", "sums", "both", "0 to 1"],
)
@pytest.mark.parametrize("panel", ["reward", "accuracy"])
def test_every_reward_is_inside_its_picture(panel, values):
    names = {"reward": ["reward/mean"], "accuracy": ["eval/accuracy", "eval/accuracy_greedy"]}
    axes = Figure().subplots()
    rows = [
        {"stage": "rl", "step": n, **dict.fromkeys(names[panel], x)} for n, x in enumerate(values)
    ]
    PANELS[panel](axes, rows)
    low, high = axes.get_ylim()
    assert low < min(0, *values) and high > max(1, *values)
    assert high - low < 1.3 * (max(1, *values) - min(0, *values))


def test_the_overlong_penalty_is_drawn_with_the_reward():
    axes = Figure().subplots()
    rows = [
        {"stage": "rl", "step": n, "reward/mean": 0.1, "reward/after_penalty_mean": -0.6}
        for n in range(5)
    ]
    plots._draw_panel(axes, PANELS["reward"], rows)
    assert axes.get_ylim()[0] < -0.6
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["with overlong penalty"]


def test_the_held_out_picture_names_its_number(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(
        plots,
        "save_figure",
        lambda figure, *_: titles.extend(axes.get_title() for axes in figure.axes),
    )
    plot_run(_rows(6), tmp_path, panels=False)
    assert "held-out accuracy (step 0: before RL)" in titles
    plot_run(_rows(6), tmp_path, panels=False, score="mean reward")
    assert "held-out mean reward (step 0: before RL)" in titles
    assert not any("warm start" in title for title in titles)  # there may have been none


@pytest.mark.parametrize("end", [0.05, 0.95], ids=["falls", "rises"])
def test_no_legend_covers_a_curve_or_a_value(monkeypatch, tmp_path, end):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, *_: figures.append(figure))
    names = [f"tool/{name}/calls" for name in ("python", "search", "calculator", "sql", "bash")]
    rows = [
        row | {"eval/accuracy": 0.5 + (end - 0.5) * row["step"] / 9, **dict.fromkeys(names, 1)}
        for row in _rows(10)
    ]
    plot_run(rows, tmp_path, panels=False)
    FigureCanvasAgg(figures[0]).draw()
    drawn = [axes for axes in figures[0].axes if axes.get_legend()]
    assert {"tools: means per episode", "seconds per step, by phase"} < {
        axes.get_title() for axes in drawn
    }
    for axes in drawn:
        box = axes.get_legend().get_window_extent()
        assert not box.overlaps(axes.patch.get_window_extent())
        assert not box.overlaps(axes.title.get_window_extent())
        for panel in figures[0].axes:  # nor what belongs to the panel above
            assert panel is axes or not box.overlaps(panel.xaxis.label.get_window_extent())
        for value in axes.texts:
            place = value.get_window_extent()
            points = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
            assert not any(place.count_contains(point) for point in points)


def test_a_legend_counts_the_lines_it_omits():
    axes = Figure().subplots()
    names = [f"tool/number_{i}/calls" for i in range(20)]
    rows = [row | dict.fromkeys(names, 1.0) for row in _rows(3)]
    plots._draw_panel(axes, plots._optional_panels(rows)["tools"], rows)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts[:-1] == sorted(names)[: len(texts) - 1]
    assert texts[-1] == f"and {20 - len(texts) + 1} more"


def test_smoothing_keeps_a_constant():
    np.testing.assert_allclose(smooth_values(np.full(9, 0.7)), 0.7, rtol=1e-12)


def test_smoothing_passes_over_what_is_not_measured():
    smooth = smooth_values(np.array([0.2, np.nan, 0.6, np.nan]))
    np.testing.assert_array_equal(smooth[[0, 2]], smooth_values(np.array([0.2, 0.6])))
    assert np.isnan(smooth[[1, 3]]).all()


def test_the_time_panel_excludes_parallel_sampling():
    axes = Figure().subplots()
    rows = [row | {"time/wait_for_rollouts_s": 0.1} for row in _rows(9)]
    plots._draw_panel(axes, PANELS["time"], rows)
    legend = axes.get_legend()
    assert legend and [t.get_text() for t in legend.get_texts()] == ["wait_for_rollouts", "train"]


def test_the_time_panel_has_the_teachers_seconds():
    axes = Figure().subplots()
    PANELS["time"](axes, [row | {"time/teacher_s": 0.4} for row in _rows(9)])
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["rollout", "teacher", "train"]
    assert len(set(plots.PHASES.values())) == len(plots.PHASES)


def test_panels_of_episodes_are_drawn_with_their_metrics(tmp_path):
    rows = [
        row | {"turns/mean": 2.5, "turns/max": 4, "tool/calls": 1.5, "stop/max_turns_frac": 0.1}
        for row in _rows(5)
    ]
    del rows[3]["stop/max_turns_frac"]  # none ended so: its share is 0
    plot_run(rows, tmp_path)
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    episode_panels = {"turns.png", "tools.png", "stops.png"}
    assert names == {f"{name}.png" for name in PANELS} | {"overview.png"} | episode_panels
    for name in episode_panels:
        assert imread(tmp_path / "plots" / name).std() > 0.01
    panels = plots._optional_panels(rows)
    axes = Figure().subplots()
    panels["stops"](axes, rows)
    shares = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert shares["stop/max_turns_frac"][2] > shares["stop/max_turns_frac"][3]


def test_swapped_rewards_are_drawn_with_the_reward(tmp_path):
    rows = [row | {"reward/mean": 0.8, "reward/swapped": 0.4} for row in _rows(5)]
    axes = Figure().subplots()
    plots._optional_panels(rows)["reward_checks"](axes, rows)
    labels = [label for line in axes.lines if not (label := str(line.get_label())).startswith("_")]
    assert labels == ["reward/mean", "reward/swapped"]
    plot_run(rows, tmp_path)
    assert (tmp_path / "plots" / "reward_checks.png").exists()


def test_steps_without_a_measurement_are_gaps():
    rows = [
        row | {"reward/mean": 0.8} | ({} if i in (1, 3) else {"reward/swapped": 1.0})
        for i, row in enumerate(_rows(5))
    ]
    axes = Figure().subplots()
    plots._optional_panels(rows)["reward_checks"](axes, rows)
    *_, values, smooth = axes.lines
    for line in (values, smooth):
        np.testing.assert_allclose(line.get_ydata(), [1.0, np.nan, 1.0, np.nan, 1.0], rtol=1e-12)
        assert line.get_marker() == "."  # between two gaps there is no line
    assert axes.lines[0].get_marker() == ""
