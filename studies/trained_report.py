# SPDX-License-Identifier: Apache-2.0
"""What a study shows over all its beds: verdicts, a table and a figure.

Next: studies/bed_study.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
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
    """Draw the difference of each contender to the first, with its interval, by bed."""
    n_rows = max(len(comparisons) for comparisons in results.values())
    figure = Figure(figsize=(4.2 * len(results), 1.5 + 0.21 * n_rows), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=False, squeeze=False)[0]
    for ax, (bed, comparisons) in zip(axes, results.items(), strict=True):
        compared = [c for c in comparisons if c.difference is not None]
        for y, c in enumerate(reversed(compared)):
            assert c.difference is not None
            mean, low, high = c.difference
            color = "tab:gray"
            if is_verdict(c):
                color = "tab:green" if mean > 0 else "tab:red"
            ax.plot([low, high], [y, y], color=color)
            ax.plot([mean], [y], "o", color=color)
        ax.set_yticks(range(len(compared)), [c.contender.name for c in reversed(compared)])
        ax.axvline(0.0, color="black", linewidth=0.8)
        first = comparisons[0]
        ax.set_title(f"{bed}\n{first.contender.name}:\nends at {np.mean(first.values):.2f}")
        ax.set_xlabel("difference, 95 %")
    save_figure(figure, path, dpi=110)
