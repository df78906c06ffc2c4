# SPDX-License-Identifier: Apache-2.0
"""The studies that repeat claims on new seeds: which contenders they have, and which seeds."""

import re
from pathlib import Path

import pytest

from jaxmoe.study import ResultsStore
from studies.bed_study import BedRuns, run_bed
from studies.confirm import MXFP4_CONFIRM, ROUTER_CONFIRM, SINKS_CONFIRM
from studies.mxfp4_trained import MXFP4
from studies.router_trained import ROUTER
from studies.sinks import SINKS

STORED = Path(__file__).parents[2] / "docs" / "results" / "studies"
SAME_RUN = ("two_forwards", "detached + R3")  # as detached old log-probs, bit by bit
REPEATED = {
    study.name: (study, again)
    for study, again in ((ROUTER, ROUTER_CONFIRM), (MXFP4, MXFP4_CONFIRM))
}


@pytest.mark.parametrize("name", REPEATED)
def test_every_interval_without_zero_is_repeated(name, tmp_path):
    study, again = REPEATED[name]
    store = ResultsStore(STORED / f"{name}.jsonl")
    for bed in study.beds:
        runs = BedRuns([bed], study.seeds, study.steps)
        comparisons = run_bed(study, runs, bed, store=store, folder=tmp_path)
        seen = [
            c.contender for c in comparisons[1:] if c.difference.low > 0 or c.difference.high < 0
        ]
        first, *repeated = again.list_contenders(study.beds[bed])
        assert first == comparisons[0].contender
        assert repeated == [c for c in seen if (bed, c.name) != SAME_RUN]


@pytest.mark.parametrize(
    ("study", "again"), [(ROUTER, ROUTER_CONFIRM), (MXFP4, MXFP4_CONFIRM), (SINKS, SINKS_CONFIRM)]
)
def test_new_seeds_follow_those_of_the_table(study, again):
    assert again.first_seed == study.seeds and again.seeds >= 2 * study.seeds
    assert again.steps == study.steps and again.beds.keys() == study.beds.keys()


def test_sentences_have_the_figures_of_a_row():
    """Difference, interval and Holm's p of each sentence are those of one line of a table."""
    page = (STORED.parent / "confirmed.md").read_text()
    text = page.partition("## What it says")[2].partition("\n## ")[0]
    figures = re.findall(r"([-+]\d\.\d+),? \(?([-+]\d\.\d+ to [-+]\d\.\d+), p ([\d.e-]+)\)", text)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for difference, interval, p_value in figures:
        cell = f"{difference} ({interval})"
        assert any(cell in row and f"| {p_value} |" in row for row in rows), cell
    assert len(figures) > 25
