# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from jaxmoe.study import ChosenRate, Column, Comparison, Contender, format_comparisons
from jaxmoe.study.contenders import compare_values
from jaxmoe.study.tables import format_table, format_verdicts


def compare(gains, seeds=8, deviation=0.02, tuning_seeds=None):
    """Comparisons of contenders with these gains over the first."""
    rng = np.random.default_rng(5)
    values = 0.5 + rng.normal(0, 0.1, seeds) + rng.normal(0, deviation, (len(gains) + 1, seeds))
    rows = [0.0, *gains]
    values += np.array(rows)[:, None]
    chosen = (ChosenRate(1e-3),) * (tuning_seeds or seeds)
    comparisons = [
        Comparison(
            Contender(f"c{n}", rates=(1e-3, 2e-3)),
            chosen,
            list(row),
            [{"norm": float(seed)} for seed in range(seeds)],
        )
        for n, row in enumerate(values)
    ]
    return compare_values(comparisons, values.tolist())


def test_verdicts_name_every_contender_once():
    comparisons = compare([0.3, -0.3, 0.0, 0.005, 0.0])
    better, worse, *others = format_verdicts(comparisons).splitlines()
    assert better.startswith("- **Shown to be better than c0**: c1 +0.29 (")
    assert worse.startswith("- **Shown to be worse than c0**: c2 -0.31")
    assert " c3, " in others[-1] and others[-1].startswith("- Open: ")
    assert sum(line.count("c4") for line in others) == 1
    highest = max(c.difference.high for c in comparisons[3:])
    assert others == [others[0]] and others[0].endswith(f" to {highest:+.2g}.")


def test_marks_are_those_of_the_corrections():
    comparisons = compare([0.3, 0.05, 0.05, 0.05, 0.0], deviation=0.03)
    cells = [line.split("|")[4].strip() for line in format_table(comparisons, {}).splitlines()[2:]]
    for c, cell in zip(comparisons[1:], cells[1:], strict=True):
        is_bold, is_italic = cell.startswith("**"), cell.startswith("*") and cell[1] != "*"
        assert is_bold == (c.corrected_p_value < 0.05)
        assert is_italic == (c.discovery_p_value < 0.05 <= c.corrected_p_value)
    assert cells[0] == "" and [cell[:2].count("*") for cell in cells] == [0, 2, 0, 0, 1, 0]


def test_a_column_reduces_a_metric():
    columns = {"norm": Column("largest norm", "{:.1f}", max)}
    head, _, row, *_ = format_table(compare([0.1]), columns).splitlines()
    assert head.endswith("| by seed | largest norm |") and row.endswith("| 7.0 |")


def test_the_note_says_how_often_tables_mislead():
    comparisons = compare([0.3] + [0.0] * 9)
    text = format_comparisons(comparisons)
    note = text.splitlines()[-1]
    assert "whose 10 contenders differ in nothing" in note and "10 or more in" in note
    assert 0 < float(re.search(r"([\d.]+)% have a bold cell", note)[1]) <= 6
    assert "would be bold in 80 %" in note and "0.0078 or more with 8 seeds" in note
    assert "were chosen by" not in note and "end below half" not in note
    assert "Rates for all 8 seeds were chosen by 1:" in format_comparisons(
        compare([0.1], tuning_seeds=1)
    )


def test_collapsed_runs_are_counted():
    comparisons = compare([0.0, 0.0])
    values = [list(c.values) for c in comparisons]
    values[1][3] = values[1][5] = 0.01
    text = format_comparisons(compare_values(comparisons, values))
    assert "below half of their line's median: c1 2." in text


def test_one_contender_has_no_comparison():
    text = format_comparisons(compare([]))
    assert "| c0 |" in text and "Shown" not in text.partition("c0 |")[0].partition("none")[0][9:]


def test_two_seeds_see_no_effect():
    text = format_comparisons(compare([0.1] * 9, seeds=2))
    assert "No effect would be bold in 80 %" in text and "more seeds" in text


@pytest.mark.parametrize("seeds", [2, 5])
def test_few_seeds_are_no_error(seeds):
    assert f"with {seeds} seeds" in format_comparisons(compare([0.1, 0.2], seeds=seeds))
