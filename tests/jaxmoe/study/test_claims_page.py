# SPDX-License-Identifier: Apache-2.0
"""Each verdict on a claim has a row elsewhere, and that row's figures are those of the claim."""

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "docs" / "results"
# a difference with its interval, a bias with its error, a small number, a size in GB
FIGURES = re.compile(
    r"[-+]\d\.\d+ \([-+]?\d\.\d+ to [-+]?\d\.\d+\)|\d\.\d+ ± \d\.\d+|"
    r"\d\.\d+e-\d+|\d+\.\d+(?= GB|x )"
)


def read_claims():
    for line in (RESULTS / "claims.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| claim", "|---")):
            yield [cell.strip() for cell in line.split("|")[1:-1]]


CLAIMS = list(read_claims())


@pytest.mark.parametrize("claim, test, outcome, verdict", CLAIMS, ids=range(len(CLAIMS)))
def test_a_verdict_has_figures_of_its_page(claim, test, outcome, verdict):
    pages = re.findall(r"\]\((\w+\.md)#", outcome + test)
    if not pages:
        assert verdict == "not tried" and not outcome
        return
    text = "".join((RESULTS / page).read_text() for page in pages)
    figures = FIGURES.findall(outcome)
    assert [figure for figure in figures if figure not in text] == []
    if "trained" in test and "seeds" in test and verdict != "holds":
        assert re.search(r"\d to [-+]?\d", outcome), "an interval"


def test_enough_claims_have_a_verdict():
    assert len(CLAIMS) > 25
    assert sum(verdict != "not tried" for *_, verdict in CLAIMS) > 20
    assert all(claim and verdict for claim, _, _, verdict in CLAIMS)
