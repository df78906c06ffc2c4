# SPDX-License-Identifier: Apache-2.0
"""What a study shows over all its beds: verdicts, a table and a figure.

Next: studies/bed_study.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmoe.observe.plots import save_figure
from jaxmoe.study.contenders import Comparison
from jaxmoe.study.tables import format_difference, format_verdicts, is_verdict

Results = Mapping[str, Sequence[Comparison]]  # by bed; the bed's own loss comes first


def format_advice(results: Results) -> str:
    """Return what is shown to be better or worse than the first contender, by bed."""
    return "\n\n".join(
        f"On `{bed}`:\n\n{format_verdicts(comparisons)}" for bed, comparisons in results.items()
    )


def format_overview(results: Results, costs: Mapping[str, float]) -> str:
    """Return one table over all beds: differences, and the cost of a step where it is measured.

    costs: of a step, relative to a step of the first contender, by contender.
    """
    names = dict.fromkeys(c.contender.name for bed in results.values() for c in bed)
    titles = ["contender", *results, *(["cost of a step"] if costs else [])]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in names:
        cells = [name]
        for bed in results.values():
            comparison = next((c for c in bed if c.contender.name == name), None)
            cells.append("" if comparison is None else format_cell(comparison))
        if costs:
            cells.append(f"{costs[name]:.2f}x" if name in costs else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_cell(comparison: Comparison) -> str:
    """The difference; of the first contender its mean."""
    return format_difference(comparison) or f"{np.mean(comparison.values):.3g}"


def plot_trained(results: Results, path: Path) -> None:
    """Draw the difference of each contender to the first, with its interval, by bed, three in a
    line."""
    columns, beds = min(3, len(results)), list(results.items())
    lines = [dict(beds[i : i + columns]) for i in range(0, len(beds), columns)]
    rows = [max(len(comparisons) for comparisons in line.values()) - 1 for line in lines]
    heights = [1.7 + 0.21 * n for n in rows]
    figure = Figure(figsize=(4.2 * columns, sum(heights)), layout="constrained")
    axes = figure.subplots(len(lines), columns, height_ratios=heights, squeeze=False)
    for line, n, axes_of_line in zip(lines, rows, axes, strict=True):
        for ax, (bed, comparisons) in zip(axes_of_line, line.items(), strict=False):
            plot_bed(ax, bed, comparisons)
            ax.set_ylim(0.5 - n, 0.5)
        for ax in axes_of_line[len(line) :]:
            ax.remove()
    save_figure(figure, path, dpi=110)


def plot_bed(ax: Axes, bed: str, comparisons: Sequence[Comparison]) -> None:
    """Draw the differences on one bed, from the top down; coloured where they are a verdict."""
    first, *compared = comparisons
    for i, c in enumerate(compared):
        assert c.difference is not None
        mean, low, high = c.difference
        color = "tab:gray"
        if is_verdict(c):
            color = "tab:green" if mean > 0 else "tab:red"
        ax.plot([low, high], [-i, -i], color=color)
        ax.plot([mean], [-i], "o", color=color)
    ax.set_yticks([-i for i in range(len(compared))], [c.contender.name for c in compared])
    ax.axvline(0.0, color="black", linewidth=0.8)
    ax.set_title(f"{bed}\n{first.contender.name}:\nends at {np.mean(first.values):.2f}")
    ax.set_xlabel("difference, 95 %")
