# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of the mismatch study: each engine's corrections against none, by length.

Next: studies/bed_study.py has the tables of the beds.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jaxmoe.observe.plots import save_figure
from jaxmoe.study.contenders import Comparison, compare_values
from jaxmoe.study.tables import count_collapses, format_difference, is_verdict
from studies.trained_report import Results

Cell = list[Comparison]  # the corrections of one engine, none first; compared with it


def split_engines(comparisons: Sequence[Comparison]) -> dict[str, Cell]:
    """Return the comparisons of each engine with its own contender without a correction."""
    engines: dict[str, Cell] = {}
    for comparison in comparisons:
        engines.setdefault(split_name(comparison)[0], []).append(comparison)
    return {
        name: compare_values(cell, [c.values for c in cell]) if len(cell) > 1 else cell
        for name, cell in engines.items()
    }


def split_name(comparison: Comparison) -> tuple[str, str]:
    """Return the names of engine and correction."""
    engine, _, correction = comparison.contender.name.rpartition(", ")
    return engine, correction


def summarize_cells(results: Results, folder: Path) -> dict[str, str]:
    """Return the section `cells`; also draw mismatch_cells.png."""
    plot_cells(results, folder / "mismatch_cells.png")
    return {"cells": format_cells(results)}


def format_cells(results: Results) -> str:
    """Return a table of all engines: loss by the mismatch, and the gain of each correction."""
    names = dict.fromkeys(split_name(c)[1] for bed in results.values() for c in bed)
    names.pop("none")
    titles = ["bed", "engine", "mean abs Δlogp", "ESS", "ends at", "none − no mismatch", *names]
    lines = [
        "`python -m studies mismatch`. Ends: mean share of right tokens of none. Its difference "
        "to the engine that does not differ, and that of each correction to none with the same "
        "engine; bold and italic by Holm's and by Benjamini and Hochberg's correction over the "
        "bed's contenders, and over the engine's.",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for bed, comparisons in results.items():
        to_clean = {c.contender.name: c for c in comparisons}
        for engine, cell in split_engines(comparisons).items():
            first, metrics = cell[0], cell[0].metrics
            gains = {split_name(c)[1]: format_gain(c) for c in cell[1:]}
            cells = [
                bed,
                engine,
                f"{np.mean([run['mismatch'] for run in metrics]):.2g}",
                f"{np.mean([run['ess'] for run in metrics]):.2f}",
                f"{np.mean(first.values):.3f}",
                format_difference(to_clean[first.contender.name]),
                *(gains.get(name, "") for name in names),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_gain(comparison: Comparison) -> str:
    """The difference, with the number of runs that collapsed."""
    collapsed = count_collapses(comparison.values)
    return format_difference(comparison) + (f", {collapsed} collapsed" if collapsed else "")


def plot_cells(results: Results, path: Path) -> None:
    """Draw the gain of each correction over none by engine, a panel a bed."""
    figure = Figure(figsize=(3.4 * len(results), 5.0), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for ax, (bed, comparisons) in zip(axes, results.items(), strict=True):
        engines = split_engines(comparisons)
        names = list(dict.fromkeys(split_name(c)[1] for c in comparisons))
        gains = np.full((len(engines), len(names)), np.nan)
        for y, cell in enumerate(engines.values()):
            for c in cell:
                gain = np.mean(c.values) - np.mean(cell[0].values)
                x = names.index(split_name(c)[1])
                gains[y, x] = gain
                weight = "bold" if is_verdict(c) else "normal"
                ax.text(x, y, f"{gain:+.2f}", ha="center", va="center", fontweight=weight, size=8)
        ax.imshow(gains, vmin=-0.2, vmax=0.2, cmap="RdYlGn", aspect="auto")
        ax.set_xticks(range(len(names)), names, rotation=60, ha="right")
        ax.set_yticks(range(len(engines)), list(engines))
        ax.set_title(bed)
    figure.suptitle("gain over no correction with the same engine")
    save_figure(figure, path, dpi=80)
