# SPDX-License-Identifier: Apache-2.0
"""Markdown tables and a figure of the trained study of routers.

Next: studies/__main__.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jaxmoe.observe.plots import save_figure
from jaxmoe.study.contenders import Comparison, format_rate

Results = Mapping[str, Sequence[Comparison]]  # by bed; the bed's own loss comes first


def format_trained_tables(results: Results, costs: Mapping[str, float] | None = None) -> str:
    """Return one table over all beds, a row a remedy, and one table of each bed.

    costs: of a step, relative to a step without a remedy, by remedy.
    """
    parts = [_format_overview(results, costs or {})]
    for bed, comparisons in results.items():
        parts.append(f"### {bed}\n\n{_format_bed(comparisons)}")
    return "\n\n".join(parts) + "\n"


def _format_overview(results: Results, costs: Mapping[str, float]) -> str:
    """Differences to the bed's own loss with 95 % intervals, and the cost of a step."""
    names = dict.fromkeys(c.contender.name for bed in results.values() for c in bed)
    lines = [
        "| remedy | " + " | ".join(results) + " | cost of a step |",
        "|---|" + "---|" * (len(results) + 1),
    ]
    for name in names:
        cells = []
        for bed in results.values():
            comparison = next((c for c in bed if c.contender.name == name), None)
            cells.append("" if comparison is None else format_difference(comparison))
        cost = f"{costs[name]:.2f}x" if name in costs else ""
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {cost} |")
    return "\n".join(lines)


def format_difference(comparison: Comparison) -> str:
    """The difference with its interval, bold if that leaves out 0; for the first its mean."""
    if comparison.difference is None:
        return f"{np.mean(comparison.values):.3f}"
    mean, low, high = comparison.difference
    text = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
    # An interval without 0 is a difference that five seeds show.
    return f"**{text}**" if low > 0 or high < 0 else text


def _format_bed(comparisons: Sequence[Comparison]) -> str:
    lines = [
        "| remedy | rate | start | end | by seed | gradient norm, p99 | largest ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in comparisons:
        by_seed, end = " ".join(f"{value:.2f}" for value in c.values), np.mean(c.values)
        start, norm = (np.mean([m[key] for m in c.metrics]) for key in ("start", "grad_norm_p99"))
        ratio = max(m["ratio_max"] for m in c.metrics)
        lines.append(
            f"| {c.contender.name} | {format_rate(c)} | {start:.2f} | {end:.3f} | {by_seed} | "
            f"{norm:.3g} | {ratio:.3g} |"
        )
    return "\n".join(lines)


def plot_trained(results: Results, path: Path) -> None:
    """Draw the difference of each contender to the first, with its interval, by bed."""
    n_rows = max(len(comparisons) for comparisons in results.values())
    figure = Figure(figsize=(4.2 * len(results), 1.5 + 0.21 * n_rows), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=False, squeeze=False)[0]
    for ax, (bed, comparisons) in zip(axes, results.items(), strict=True):
        compared = [c for c in comparisons if c.difference is not None]
        for y, c in enumerate(reversed(compared)):
            assert c.difference is not None
            mean, low, high = c.difference
            color = "tab:green" if low > 0 else "tab:red" if high < 0 else "tab:gray"
            ax.plot([low, high], [y, y], color=color)
            ax.plot([mean], [y], "o", color=color)
        ax.set_yticks(range(len(compared)), [c.contender.name for c in reversed(compared)])
        ax.axvline(0.0, color="black", linewidth=0.8)
        first = comparisons[0]
        ax.set_title(f"{bed}\n{first.contender.name}:\nends at {np.mean(first.values):.2f}")
        ax.set_xlabel("difference, 95 %")
    save_figure(figure, path, dpi=110)
