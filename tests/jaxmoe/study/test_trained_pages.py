# SPDX-License-Identifier: Apache-2.0
"""What the pages of trained studies say of their tables is what the tables hold."""

import re
from pathlib import Path

import pytest
from scipy import stats

RESULTS = Path(__file__).parents[3] / "docs" / "results"
INTERVAL = re.compile(r"(\*\*)?([-+]\d\.\d+) \(([-+]\d\.\d+) to ([-+]\d\.\d+)\)")


def read_table(page, title):
    text = (RESULTS / f"{page}.md").read_text()
    section = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def find_p_value(cell, seeds):
    _, mean, low, high = INTERVAL.fullmatch(cell.removesuffix("**")).groups()
    error = (float(high) - float(low)) / 2 / stats.t.ppf(0.975, seeds - 1)
    return 2 * stats.t.sf(abs(float(mean)) / error, seeds - 1)


def keep_significant(p_values, rate=0.05):
    """The names that Benjamini and Hochberg's correction keeps at a false discovery rate."""
    ordered = sorted(p_values, key=p_values.get)
    ranks = [n for n, name in enumerate(ordered, 1) if p_values[name] <= rate * n / len(ordered)]
    return set(ordered[: max(ranks, default=0)])


@pytest.mark.parametrize(
    ("bed", "column", "count", "n_bold", "lost"),
    [
        ("two_forwards", 1, 25, 16, set()),
        ("noisy_engine", 2, 25, 2, {"detached old log-probs", "GSPO"}),
        (
            "many_updates",
            3,
            29,
            14,
            {
                "load balance 0.01",
                "z-loss 1e-3",
                "frozen router",
                "R2 + dual clip 3",
                "soft → hard in 20 steps",
            },
        ),
    ],
)
def test_the_router_page_counts_its_comparisons(bed, column, count, n_bold, lost):
    cells = {row[0]: row[column] for row in read_table("router_trained", "All beds")[1:]}
    cells = {name: cell for name, cell in cells.items() if cell}
    bold = {name for name, cell in cells.items() if cell.startswith("**")}
    assert (len(cells), len(bold)) == (count, n_bold)
    significant = keep_significant({name: find_p_value(cell, 5) for name, cell in cells.items()})
    assert bold - significant == lost and significant <= bold


@pytest.mark.parametrize(
    ("bed", "n_lowest", "count"),
    [("two_forwards", 16, 25), ("noisy_engine", 19, 25), ("many_updates", 24, 29)],
)
def test_the_router_page_counts_rates_at_the_edge(bed, n_lowest, count):
    rates = {row[0]: row[1] for row in read_table("router_trained", bed)}
    assert rates.pop("nothing") == "0.00025"
    assert (list(rates.values()).count("0.00025"), len(rates)) == (n_lowest, count)
    assert f"{n_lowest} of {count}" in (RESULTS / "router_trained.md").read_text()


def test_the_four_bit_page_names_rates_at_edges():
    rows = [row for bed in ("automaton", "reversal") for row in read_table("mxfp4_trained", bed)]
    assert [row[0] for row in rows if row[1] == "0.00025"] == [
        "four-bit engine",
        "four-bit engine, ratio to it",
    ]
    beds = ("automaton", "reversal", "small_rate")
    p_values = {
        (bed, row[0]): find_p_value(row[2], 8)
        for bed in beds
        for row in read_table("mxfp4_trained", bed)[1:]
    }
    assert len(p_values) == 19
    assert keep_significant(p_values) == {name for name, p in p_values.items() if p < 0.05}
