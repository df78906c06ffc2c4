# SPDX-License-Identifier: Apache-2.0
"""What the pages of trained studies say of their tables is what the tables hold."""

import re
from pathlib import Path

import pytest
from scipy import stats

from jaxmoe.study import correct_discoveries, correct_p_values

RESULTS = Path(__file__).parents[3] / "docs" / "results"
INTERVAL = re.compile(r"\**([-+]\d\.\d+) \(([-+]\d\.\d+) to ([-+]\d\.\d+)\)\**")


def read_table(page, title):
    text = (RESULTS / f"{page}.md").read_text()
    section = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def find_p_value(cell, seeds):
    mean, low, high = INTERVAL.fullmatch(cell).groups()
    error = (float(high) - float(low)) / 2 / stats.t.ppf(0.975, seeds - 1)
    return 2 * stats.t.sf(abs(float(mean)) / error, seeds - 1)


@pytest.mark.parametrize(
    ("bed", "counts"),
    [
        ("automaton", (8, 4, 4, 0)),
        ("reversal", (8, 3, 1, 2)),
        ("small_rate", (3, 2, 2, 0)),
    ],
)
def test_older_tables_have_corrected_marks(bed, counts):
    """Of the intervals as they are printed: those tables' raw results were not kept."""
    cells = [row[2] for row in read_table("mxfp4_trained", bed)[1:]]
    p_values = [find_p_value(cell, 8) for cell in cells]
    holm, discoveries = correct_p_values(p_values), correct_discoveries(p_values)
    for cell, verdict, discovery in zip(cells, holm < 0.05, discoveries < 0.05, strict=True):
        mark = "**" if verdict else "*" if discovery else ""
        assert cell == f"{mark}{cell.strip('*')}{mark}"
    n_single = sum(p_value < 0.05 for p_value in p_values)
    n_bold, n_marked = sum(holm < 0.05), sum(discoveries < 0.05)
    assert (len(cells), n_single, n_bold, n_marked - n_bold) == counts


def test_the_four_bit_page_names_rates_at_edges():
    rows = [row for bed in ("automaton", "reversal") for row in read_table("mxfp4_trained", bed)]
    assert [row[0] for row in rows if row[1] == "0.00025"] == [
        "four-bit engine",
        "four-bit engine, ratio to it",
    ]


@pytest.mark.parametrize("page", ["router_trained", "mxfp4_trained"])
def test_the_next_results_have_their_places(page):
    text = (RESULTS / f"{page}.md").read_text()
    for section in ("advice", "tables"):
        mark = f"<!-- {page.removesuffix('_trained')}: {section} -->"
        assert text.count(mark) == 1
    assert text.count("<!-- end -->") == 2
