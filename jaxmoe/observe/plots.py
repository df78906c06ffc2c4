# SPDX-License-Identifier: Apache-2.0
"""Plots of a run in its folder: plots/overview.png, and each panel in a separate file."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxmoe.run_files import make_folder, replace_file

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
GREY, SKY, RED = "#888888", "#56B4E9", "#D55E00"
WAIT = "wait_for_rollouts"
PHASES = {
    "rollout": BLUE,
    "reward": ORANGE,
    WAIT: GREY,
    "teacher": RED,
    "train": GREEN,
    "weight_sync": PINK,
    "eval": SKY,
}
_COLOURS = (BLUE, ORANGE, GREEN, PINK, GREY, SKY)
_STOP = re.compile(r"stop/\w+_frac", re.ASCII)
_PASS_AT_K = re.compile(r"eval/pass@\d{1,6}", re.ASCII)
# A reward that can be bought raises one of these (docs/reward_hacking.md).
_REWARD_CHECKS = ("reward/swapped", "reward/second_grader_disagrees")
_LEGEND_CHARS = 64  # of a line of a legend that is as wide as its panel
_MAX_LEGEND_LINES = 3
LOG_FLOOR = 1e-9  # position of an exact 0 on a log axis

Rows = Sequence[Mapping[str, Any]]


def plot_run(rows: Rows, directory: Path, *, panels: bool = True, score: str = "accuracy") -> None:
    """Draw the metrics so far. A panel without metrics stays empty; an optional one is left out.

    panels: False to draw only the overview, which takes half a second.
    score: name of the score of held-out rows: "accuracy", or "mean reward" with data.rewards.
    """
    folder = make_folder(directory / "plots")
    rl = [row for row in rows if row["stage"] == "rl"]
    drawn = PANELS | {"accuracy": partial(_plot_accuracy, score=score)} | _optional_panels(rl)
    n_rows = -(-len(drawn) // 4)
    figure = Figure(figsize=(16, 3.3 * n_rows))  # a constrained layout would take 50 % longer
    figure.subplots_adjust(0.04, 0.18 / n_rows, 0.99, 1 - 0.2 / n_rows, wspace=0.18, hspace=0.56)
    places = figure.subplots(n_rows, 4).flat
    for axes in places[len(drawn) :]:
        axes.set_axis_off()
    for (name, draw), axes in zip(drawn.items(), places, strict=False):
        _draw_panel(axes, draw, rl)
        if not panels:
            continue
        single = Figure(figsize=(6, 4))
        single.subplots_adjust(0.12, 0.13, 0.97, 0.85)
        _draw_panel(single.subplots(), draw, rl)
        save_figure(single, folder / f"{name}.png", 110)
    save_figure(figure, folder / "overview.png", 85)


def _draw_panel(axes: Axes, draw: Callable[[Axes, Rows], None], rows: Rows) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xlabel("RL step")
    draw(axes, rows)
    if not axes.has_data():
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", color=GREY)
    _add_legend(axes)


def _add_legend(axes: Axes) -> None:
    """Add a legend between the title and the axes, where it covers no curve and no value."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    n_columns = max(1, min(len(labels), _LEGEND_CHARS // (max(map(len, labels)) + 6)))
    n_lines = -(-len(labels) // n_columns)
    count = n_columns * min(n_lines, _MAX_LEGEND_LINES)
    if count < len(labels):
        labels[count - 1] = f"and {len(labels) - count + 1} more"
    axes.legend(
        handles[:count],
        labels[:count],
        frameon=False,
        fontsize=7,
        ncols=n_columns,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        borderpad=0,
        borderaxespad=0.2,
        labelspacing=0.2,
        columnspacing=1.2,
        handlelength=1.5,
    )
    axes.set_title(
        axes.get_title(),
        fontsize=axes.title.get_fontsize(),
        pad=6 + 10 * min(n_lines, _MAX_LEGEND_LINES),
    )


def save_figure(figure: Figure, path: Path, dpi: int) -> None:
    """Save a figure as PNG. Raises RunFolderError if it cannot be written."""
    # Without pyplot, which keeps every figure in a global list and may look for a display.
    FigureCanvasAgg(figure)
    with replace_file(path) as file:
        figure.savefig(file, dpi=dpi, format="png")


def metric_series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a metric, at the steps at which it was logged."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([p[0] for p in points]), np.array([p[1] for p in points], float)


def smooth_values(values: np.ndarray, weight: float = 0.8) -> np.ndarray:
    """Exponential moving average with bias correction; a NaN, which is not measured, stays one."""
    out, mean, total = np.full_like(values, np.nan), 0.0, 0.0
    for i, value in enumerate(values):
        if np.isnan(value):
            continue
        mean, total = weight * mean + (1 - weight) * value, weight * total + 1 - weight
        out[i] = mean / total
    return out


def _plot_line(axes: Axes, rows: Rows, name: str, title: str, colour: str) -> None:
    steps, values = metric_series(rows, name)
    if len(steps):
        axes.plot(
            steps, values, color=colour, alpha=0.3, lw=1, marker="." if len(steps) < 3 else ""
        )
        axes.plot(steps, smooth_values(values), color=colour, lw=2)
    axes.set_title(title)


def _set_score_limits(axes: Axes, *, above: float = 0.02) -> None:
    """Set limits to 0…1, or wider: rewards may be negative or greater than 1."""
    drawn = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    values = np.concatenate([np.array([0.0, 1.0]), *drawn])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    axes.set_ylim(low - 0.02 * (high - low), high + above * (high - low))


def _plot_reward(axes: Axes, rows: Rows) -> None:
    _plot_line(axes, rows, "reward/mean", "mean training reward", BLUE)
    steps, trained = metric_series(rows, "reward/after_penalty_mean")
    if len(steps):
        axes.plot(
            steps, smooth_values(trained), color=ORANGE, lw=1.5, label="with overlong penalty"
        )
    _set_score_limits(axes)


def _plot_accuracy(axes: Axes, rows: Rows, score: str = "accuracy") -> None:
    steps, values = metric_series(rows, "eval/accuracy_greedy")
    if len(steps):
        axes.plot(steps, values, color=GREY, lw=1, marker=".", ms=4, label="greedy")
    steps, values = metric_series(rows, "eval/accuracy")
    if len(steps):
        axes.plot(steps, values, color=GREEN, lw=2, marker="o", ms=4, label="sampled")
        metric, label = _find_pass_at_k(rows)
        if metric:
            label = label if score == "accuracy" else label.replace("pass@", "best of ")
            axes.plot(*metric_series(rows, metric), color=SKY, lw=1, marker=".", ms=4, label=label)
        axes.annotate(
            f"{values[-1]:.2f}",
            (steps[-1], values[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    _set_score_limits(axes, above=0.1)
    axes.set_title(f"held-out {score} (step 0: before RL)")
    axes.title.set_fontsize(10)


def _find_pass_at_k(rows: Rows) -> tuple[str, str]:
    """(metric name, label) of the largest k; ("", "") if there is none."""
    names = {name for row in rows for name in row if _PASS_AT_K.fullmatch(name)}
    largest = max(names, key=lambda name: int(name.partition("@")[2]), default="")
    return largest, largest.removeprefix("eval/")


def _plot_share(axes: Axes, rows: Rows, name: str, title: str, colour: str) -> None:
    _plot_line(axes, rows, name, title, colour)
    axes.set_ylim(-0.02, 1.02)


def _plot_no_signal(axes: Axes, rows: Rows) -> None:
    _plot_share(
        axes, rows, "reward/zero_std_groups_frac", "share of groups with equal rewards", PINK
    )


def _plot_truncated(axes: Axes, rows: Rows) -> None:
    _plot_share(axes, rows, "stop/max_tokens_frac", "share of truncated answers", ORANGE)


def _plot_length(axes: Axes, rows: Rows) -> None:
    _plot_line(axes, rows, "response_len/mean", "answer length, tokens: mean and maximum", BLUE)
    steps, values = metric_series(rows, "response_len/max")
    axes.plot(steps, values, color=GREY, lw=1, marker="." if len(steps) < 3 else "")
    axes.set_ylim(bottom=0)


def _plot_clipped(axes: Axes, rows: Rows) -> None:
    for end, colour, label in (
        ("", GREY, "all"),
        ("_high", GREEN, "A > 0"),
        ("_low", PINK, "A < 0"),
    ):
        steps, values = metric_series(rows, f"policy/clip_frac{end}")
        if len(steps):
            axes.plot(steps, values, color=colour, lw=1.5, label=label)
    axes.set_title("share of tokens clipped")
    axes.set_ylim(bottom=0)


def _plot_kl_ref(axes: Axes, rows: Rows) -> None:
    _plot_line(axes, rows, "policy/kl_ref", "KL to the reference policy, nats per token", GREEN)
    if not axes.has_data() and rows:
        axes.text(
            0.5,
            0.4,
            "(loss.kl_coef=0: no reference)",
            transform=axes.transAxes,
            ha="center",
            color=GREY,
        )


def _plot_entropy(axes: Axes, rows: Rows) -> None:
    _plot_line(axes, rows, "policy/entropy", "policy entropy, nats per token", ORANGE)
    axes.set_ylim(bottom=0)


def _plot_grad_norm(axes: Axes, rows: Rows) -> None:
    _plot_line(axes, rows, "grad/norm", "gradient norm before clipping", PINK)
    axes.set_ylim(bottom=0)


def _plot_gap(axes: Axes, rows: Rows) -> None:
    for name, colour, label in (
        ("train_rollout_logprob_abs_diff", BLUE, "mean"),
        ("train_rollout_logprob_abs_diff_max", GREY, "max"),
    ):
        steps, values = metric_series(rows, name)
        if len(steps):
            zero = " (0.0)" if (values == 0).all() else ""
            axes.plot(steps, np.maximum(values, LOG_FLOOR), color=colour, label=label + zero)
    axes.set_yscale("log")
    if axes.has_data():
        top = max(float(np.max(np.asarray(x.get_ydata()), initial=LOG_FLOOR)) for x in axes.lines)
        axes.set_ylim(LOG_FLOOR / 3, max(1e4 * LOG_FLOOR, 3 * top))
        # An exact 0 is drawn at the floor, whose tick is labelled 0.0.
        axes.yaxis.set_major_formatter(lambda y, _: "0.0" if y <= LOG_FLOOR * 1.01 else f"{y:.0e}")
    axes.set_title("engine gap: |logp − rollout_logp|, nats")


def _plot_time(axes: Axes, rows: Rows) -> None:
    steps, _ = metric_series(rows, "time/step_s")
    present = [p for p in PHASES if any(f"time/{p}_s" in row for row in rows)]
    if WAIT in present:  # async rollouts: only the waiting adds to the step's time
        present = [p for p in present if p not in ("rollout", "reward")]
    timed = [row for row in rows if row.get("time/step_s") is not None]
    if len(steps) and present:
        values = [[row.get(f"time/{p}_s") or 0.0 for row in timed] for p in present]
        axes.stackplot(steps, values, labels=present, colors=[PHASES[p] for p in present])
        # The first step includes compilation; scale the axis to the others.
        usual = np.sum(values, axis=0)[1:] if len(steps) > 2 else np.sum(values, axis=0)
        axes.set_ylim(0, 1.25 * float(np.max(usual, initial=1e-3)))
    axes.set_title("seconds per step, by phase")


def _optional_panels(rows: Rows) -> dict[str, Callable[[Axes, Rows], None]]:
    """Return the panels of metrics that some runs do not log."""
    names = sorted({name for row in rows for name, value in row.items() if value is not None})
    tools = [name for name in names if name.startswith(("tool/", "hack/"))]
    stops = [name for name in names if _STOP.fullmatch(name)]
    panels: dict[str, Callable[[Axes, Rows], None]] = {}
    checks = [name for name in _REWARD_CHECKS if name in names]
    if checks:
        panels["reward_checks"] = partial(
            _plot_lines,
            names=["reward/mean", *checks],
            title="can the reward be bought?",
            absent=np.nan,
        )
    if "turns/mean" in names:
        panels["turns"] = _plot_turns
    if tools:
        panels["tools"] = partial(_plot_lines, names=tools, title="tools: means per episode")
    # Single answers have no reason but this one, which has a panel of its own.
    if stops != ["stop/max_tokens_frac"] and stops:
        panels["stops"] = partial(_plot_lines, names=stops, title="share of episodes, by their end")
    return panels


def _plot_turns(axes: Axes, rows: Rows) -> None:
    _plot_line(axes, rows, "turns/mean", "turns of an episode: mean and maximum", BLUE)
    steps, values = metric_series(rows, "turns/max")
    axes.plot(steps, values, color=GREY, lw=1, marker="." if len(steps) < 3 else "")
    axes.set_ylim(bottom=0)


def _plot_lines(
    axes: Axes, rows: Rows, *, names: Sequence[str], title: str, absent: float = 0.0
) -> None:
    """Draw several metrics.

    absent: value of a metric in a step that was logged without it; NaN leaves a gap.
    """
    logged = [row for row in rows if row.get("reward/mean") is not None]
    steps = np.array([row["step"] for row in logged])
    for name, colour in zip(names, itertools.cycle(_COLOURS)):
        values = np.array([absent if row.get(name) is None else row[name] for row in logged], float)
        # A point between two gaps is on no line.
        marker = "." if len(steps) < 3 or np.isnan(values).any() else ""
        axes.plot(steps, values, color=colour, alpha=0.25, lw=1, marker=marker)
        axes.plot(steps, smooth_values(values), color=colour, lw=1.5, marker=marker, label=name)
    axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
    axes.set_title(title)


PANELS: dict[str, Callable[[Axes, Rows], None]] = {
    "reward": _plot_reward,
    "accuracy": _plot_accuracy,
    "entropy": _plot_entropy,
    "grad_norm": _plot_grad_norm,
    "logprob_gap": _plot_gap,
    "time": _plot_time,
    "no_signal": _plot_no_signal,
    "response_length": _plot_length,
    "truncated": _plot_truncated,
    "clipped": _plot_clipped,
    "kl_ref": _plot_kl_ref,
}
