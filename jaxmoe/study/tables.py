# SPDX-License-Identifier: Apache-2.0
"""Comparisons as Markdown: verdicts, a table, and how far both can be trusted.

Next: jaxmoe/study/train_config.py, one way to run a contender.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.study.contenders import Comparison
from jaxmoe.study.families import LEVEL, FamilyChances, simulate_family


@dataclass(frozen=True)
class Column:
    """One more column: a metric of the runs, reduced over the seeds."""

    title: str
    form: str
    reduce: Callable[[list[float]], Any] = np.mean


def format_comparisons(
    comparisons: Sequence[Comparison], columns: Mapping[str, Column] | None = None
) -> str:
    """Return Markdown: what the comparisons show, their table, and what it can show at all.

    columns: more of them, by metric.
    """
    return "\n\n".join(
        [
            format_verdicts(comparisons),
            format_table(comparisons, columns or {}),
            format_chances(comparisons),
        ]
    )


def format_table(comparisons: Sequence[Comparison], columns: Mapping[str, Column]) -> str:
    """Return the table: a row a contender, with its difference to the first one."""
    titles = [
        *("", "rate", "mean", "difference, 95 %", "median of it, exact"),
        *("p, Holm", "p, BH", "p, signs", "by seed"),
        *(column.title for column in columns.values()),
    ]
    lines = [f"| {' | '.join(titles)} |".replace("|  |", "| |"), "|" + "---|" * len(titles)]
    for c in comparisons:
        p_values = (c.corrected_p_value, c.discovery_p_value, c.sign_flip_p_value)
        cells = [
            c.contender.name,
            format_rates(c),
            f"{np.mean(c.values):.3g}",
            format_difference(c),
            "" if c.median is None else str(c.median),
            *("" if p is None else f"{p:.2g}" for p in p_values),
            " ".join(f"{value:.3g}" for value in c.values),
            *(
                column.form.format(column.reduce([run[metric] for run in c.metrics]))
                for metric, column in columns.items()
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_verdict(comparison: Comparison) -> bool:
    """True if Holm's correction leaves the difference significant."""
    return comparison.corrected_p_value is not None and comparison.corrected_p_value < LEVEL


def is_discovery(comparison: Comparison) -> bool:
    """True if only Benjamini and Hochberg's correction leaves the difference significant."""
    p_value = comparison.discovery_p_value
    return p_value is not None and p_value < LEVEL and not is_verdict(comparison)


def format_difference(comparison: Comparison) -> str:
    """The difference with its interval: bold for a verdict, italic for a discovery."""
    if comparison.difference is None:
        return ""
    mark = "**" if is_verdict(comparison) else "*" if is_discovery(comparison) else ""
    return f"{mark}{comparison.difference}{mark}"


def format_rates(comparison: Comparison) -> str:
    """The median of the chosen rates and their range; with * if one has no lower or higher one."""
    rates = sorted(choice.rate for choice in comparison.chosen if choice.rate is not None)
    if not rates:
        return ""
    middle = f"{rates[(len(rates) - 1) // 2]:g}"
    span = f" ({rates[0]:g} to {rates[-1]:g})" if rates[0] != rates[-1] else ""
    star = "" if all(choice.is_inside for choice in comparison.chosen) else "*"
    return middle + span + star


def format_verdicts(comparisons: Sequence[Comparison]) -> str:
    """Return a list: which contenders are better or worse than the first, and which are open."""
    first, *rows = comparisons
    lines: list[str] = []
    for word, sign in (("better", 1), ("worse", -1)):
        same_sign = [c for c in rows if c.difference is not None and sign * c.difference.mean > 0]
        verdicts = ", ".join(_name_difference(c) for c in same_sign if is_verdict(c)) or "none"
        lines.append(f"- **Shown to be {word} than {first.contender.name}**: {verdicts}.")
        discoveries = ", ".join(_name_difference(c) for c in same_sign if is_discovery(c))
        if discoveries:
            lines.append(f"- Perhaps {word}: {discoveries}.")
    undecided = [c for c in rows if not is_verdict(c) and not is_discovery(c)]
    if undecided:
        spans = [c.difference for c in undecided if c.difference is not None]
        low, high = min(x.low for x in spans), max(x.high for x in spans)
        names = ", ".join(c.contender.name for c in undecided)
        lines.append(f"- Open: {names}. Their intervals reach from {low:+.2g} to {high:+.2g}.")
    return "\n".join(lines)


def _name_difference(comparison: Comparison) -> str:
    assert comparison.difference is not None
    mean, low, high = comparison.difference
    return f"{comparison.contender.name} {mean:+.2g} ({low:+.2g} to {high:+.2g})"


def format_chances(comparisons: Sequence[Comparison]) -> str:
    """Return the paragraph below a table: what its marks mean, and how often they mislead."""
    first, *rows = comparisons
    if not rows:
        return ""
    seeds, n_rows = len(first.values), len(rows)
    chances = simulate_family([c.values for c in comparisons])
    lowest_p = 2.0 ** (1 - seeds)
    median = rows[0].median
    assert median is not None
    parts = [
        f"Bold: p below {LEVEL:g} after Holm's correction; italic: after Benjamini and Hochberg's "
        f"alone. The interval of the median has {median.confidence:.1%}; the p of exchanged signs "
        f"is not corrected, and {lowest_p:.2g} or more with {seeds} seeds.",
        _describe_false_cells(chances, n_rows),
        _describe_visible(chances.visible_effect),
        *_describe_rates(comparisons),
        *_describe_collapses(comparisons),
    ]
    return " ".join(parts)


def _describe_visible(effect: float) -> str:
    if math.isinf(effect):
        return "No effect would be bold in 80 % of such tables: they need more seeds."
    return f"An effect of {effect:.2g} would be bold in 80 % of such tables."


def _describe_false_cells(chances: FamilyChances, n_rows: int) -> str:
    counts = [k for k in (1, 2, 3, 5, 10) if k <= n_rows]
    intervals = ", ".join(f"{k} or more in {chances.n_intervals[k - 1]:.1%}" for k in counts)
    return (
        f"Of 2,000 simulated tables whose {n_rows} contenders differ in nothing from the baseline "
        "that they share, with the residuals of this one, single intervals leave out 0: "
        f"{intervals}; {chances.any_verdict:.1%} have a bold cell, {chances.any_discovery:.1%} a "
        "bold or italic one."
    )


def _describe_rates(comparisons: Sequence[Comparison]) -> list[str]:
    choices = [choice for c in comparisons for choice in c.chosen]
    edges = sum(not choice.is_inside for choice in choices)
    parts = []
    if edges:
        parts.append(
            f"*: {edges} of {len(choices)} choices are the lowest or the highest rate that was "
            "tried, where the limit of rates was reached."
        )
    seeds = len(comparisons[0].values)
    shared = [c for c in comparisons if len(c.contender.rates) > 1 and len(c.chosen) < seeds]
    if shared:
        parts.append(
            f"Rates for all {seeds} seeds were chosen by {len(shared[0].chosen)}: a bad choice for "
            "the first line is in all differences, and these chances do not count it "
            "(`python -m studies referee`)."
        )
    return parts


def _describe_collapses(comparisons: Sequence[Comparison]) -> list[str]:
    collapsed = {c.contender.name: count_collapses(c.values) for c in comparisons}
    names = ", ".join(f"{name} {count}" for name, count in collapsed.items() if count)
    if not names:
        return []
    return [
        f"Runs that end below half of their line's median: {names}. Where runs collapse, Student's "
        "interval covers the true mean less often than 95 %; that of the median holds."
    ]


def count_collapses(values: Sequence[float]) -> int:
    """The number of values below half of their median."""
    return int(np.sum(np.asarray(values) < np.median(values) / 2))
