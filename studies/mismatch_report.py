# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of the mismatch study: what each engine costs, and each correction gains.

Next: studies/bed_study.py has the tables of the beds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jaxmoe.observe.plots import save_figure
from jaxmoe.study.contenders import Comparison, compare_values
from jaxmoe.study.families import correct_discoveries, correct_p_values
from jaxmoe.study.tables import count_collapses, format_difference, is_discovery, is_verdict
from studies.trained_report import Results


@dataclass(frozen=True)
class EngineCells:
    """The runs with one engine.

    none: without a correction, compared with none of the bed's first engine, which does not differ.
    gains: of each correction over `none`, by its name.
    """

    none: Comparison
    gains: Mapping[str, Comparison]


def compare_engines(comparisons: Sequence[Comparison]) -> dict[str, EngineCells]:
    """Return the cells of a bed by engine.

    p is corrected over the costs of all its engines, and over the gains of all its corrections.
    """
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(split_name(comparison)[0], []).append(comparison)
    costs = correct_together([group[0] for group in groups.values()])
    gains: list[Comparison] = []
    for group in groups.values():
        gains += compare_values(group, [c.values for c in group])[1:] if len(group) > 1 else []
    gains = correct_together(gains)
    return {
        engine: EngineCells(
            none, {split_name(c)[1]: c for c in gains if split_name(c)[0] == engine}
        )
        for engine, none in zip(groups, costs, strict=True)
    }


def correct_together(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with p corrected over all of them that have one."""
    p_values = [c.p_value for c in comparisons if c.p_value is not None]
    corrected = iter(zip(correct_p_values(p_values), correct_discoveries(p_values), strict=True))

    def correct(comparison: Comparison) -> Comparison:
        if comparison.p_value is None:
            return comparison
        holm, discovery = next(corrected)
        return replace(
            comparison, corrected_p_value=float(holm), discovery_p_value=float(discovery)
        )

    return [correct(c) for c in comparisons]


def split_name(comparison: Comparison) -> tuple[str, str]:
    """Return the names of engine and correction."""
    engine, _, correction = comparison.contender.name.rpartition(", ")
    return engine, correction


def summarize_cells(results: Results, folder: Path) -> dict[str, str]:
    """Return the sections `advice` and `cells`; also draw mismatch_cells.png."""
    plot_cells(results, folder / "mismatch_cells.png")
    return {"advice": format_findings(results), "cells": format_cells(results)}


def format_findings(results: Results) -> str:
    """Return what is shown, a line each: engines that cost, corrections that gain or lose."""
    beds = {bed: compare_engines(comparisons) for bed, comparisons in results.items()}
    costs = [(bed, cells.none) for bed, engines in beds.items() for cells in engines.values()]
    gains = [
        (bed, gain)
        for bed, engines in beds.items()
        for cells in engines.values()
        for gain in cells.gains.values()
    ]
    n_seeds = len(costs[0][1].values)
    return "\n".join(
        [
            *list_findings("An engine costs, without a correction", costs, -1),
            *count_open(costs),
            *list_findings("A correction gains over none with the same engine", gains, 1),
            *count_open(gains),
            *list_findings("A correction loses to none with the same engine", gains, -1),
            "",
            f"In brackets intervals of 95 % over {n_seeds} seeds, then p by Holm's correction "
            "over the costs or the gains of the bed. *Perhaps*: by Benjamini and Hochberg's "
            "correction alone.",
        ]
    )


def list_findings(title: str, rows: Sequence[tuple[str, Comparison]], sign: int) -> Iterator[str]:
    """Yield a line with the rows (bed, comparison) of this sign where it is shown, or perhaps."""
    signed = [(bed, c) for bed, c in rows if c.difference and sign * c.difference.mean > 0]
    shown = [describe(bed, c) for bed, c in signed if is_verdict(c)]
    perhaps = [describe(bed, c) for bed, c in signed if is_discovery(c)]
    yield f"- **{title}**: {'; '.join(shown) or 'shown nowhere'}."
    if perhaps:
        yield f"- *Perhaps*, as above: {'; '.join(perhaps)}."


def count_open(rows: Sequence[tuple[str, Comparison]]) -> Iterator[str]:
    """Yield a line about the rows of which nothing is shown, if there are any."""
    undecided = [c.difference for _, c in rows if not is_verdict(c) and not is_discovery(c)]
    rest = [difference for difference in undecided if difference is not None]
    if rest:
        low, high = min(x.low for x in rest), max(x.high for x in rest)
        yield f"- Open: {len(rest)} others. Their intervals reach from {low:+.2f} to {high:+.2f}."


def describe(bed: str, comparison: Comparison) -> str:
    """The row of a difference, its interval and its corrected p."""
    engine, correction = split_name(comparison)
    name = f"`{bed}`, {engine}" + (f", {correction}" if correction != "none" else "")
    return f"{name}: {comparison.difference}, p {comparison.corrected_p_value:.2g}"


def format_cells(results: Results) -> str:
    """Return a table of all engines: loss by the mismatch, and the gain of each correction."""
    names = dict.fromkeys(split_name(c)[1] for bed in results.values() for c in bed)
    names.pop("none")
    titles = ["bed", "engine", "mean abs Δlogp", "ESS", "ends at", "none − no mismatch", *names]
    lines = [
        "`python -m studies mismatch`. Ends: mean share of right tokens of none. Its difference "
        "to the engine that does not differ, and that of each correction to none with the same "
        "engine; bold and italic by Holm's and by Benjamini and Hochberg's correction over the "
        "bed's engines, and over all its corrections.",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for bed, comparisons in results.items():
        for engine, cells in compare_engines(comparisons).items():
            metrics = cells.none.metrics
            gains = {name: format_gain(gain) for name, gain in cells.gains.items()}
            row = [
                bed,
                engine,
                f"{np.mean([run['mismatch'] for run in metrics]):.2g}",
                f"{np.mean([run['ess'] for run in metrics]):.2f}",
                f"{np.mean(cells.none.values):.3f}",
                format_difference(cells.none),
                *(gains.get(name, "") for name in names),
            ]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def format_gain(comparison: Comparison) -> str:
    """The difference, with the number of runs that collapsed."""
    collapsed = count_collapses(comparison.values)
    return format_difference(comparison) + (f", {collapsed} collapsed" if collapsed else "")


def plot_cells(results: Results, path: Path) -> None:
    """Draw the gain of each correction over none by engine, a panel a bed."""
    n_rows = -(-len(results) // 3)
    figure = Figure(figsize=(16.0, 4.5 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, min(3, len(results)), squeeze=False).flat
    for ax, (bed, comparisons) in zip(axes, results.items(), strict=False):
        engines = compare_engines(comparisons)
        names = list(dict.fromkeys(name for cells in engines.values() for name in cells.gains))
        gains = np.full((len(engines), len(names)), np.nan)
        for y, cells in enumerate(engines.values()):
            for name, c in cells.gains.items():
                assert c.difference is not None
                x = names.index(name)
                gains[y, x] = c.difference.mean
                weight = "bold" if is_verdict(c) else "normal"
                color = "white" if abs(gains[y, x]) > 0.15 else "black"
                style = {"fontweight": weight, "color": color, "ha": "center", "va": "center"}
                ax.text(x, y, f"{gains[y, x]:+.2f}", **style)
        ax.imshow(gains, vmin=-0.2, vmax=0.2, cmap="RdYlGn", aspect="auto")
        ax.set_xticks(range(len(names)), names, rotation=60, ha="right")
        ax.set_yticks(range(len(engines)), list(engines))
        ax.set_title(bed)
    figure.suptitle("gain over no correction with the same engine")
    save_figure(figure, path, dpi=56)
