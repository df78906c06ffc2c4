# SPDX-License-Identifier: Apache-2.0
"""Pages of trained beds are made from their stored results, and a cell can be trained anew."""

import re
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.study import ResultsStore
from jaxmoe.study.contenders import compare_values
from studies import __main__ as command
from studies.bed_study import BedRuns, run_bed

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STUDIES = {study.name: study for study in command.BED_STUDIES}
# Of each study a bed and a contender, with the contender that it is compared with.
CELLS = {
    "mismatch": ("tokens16", "noise 0.1, none", "noise 0.1, geometric rejection"),
    "mxfp4": ("transitions", "dense, then rounded", "four-bit engine, ratio to it"),
    "router": ("two_forwards", "nothing", "detached old log-probs"),
    "sinks": ("shifted_sinks", "all gradients", "a trainer without sinks"),
    "router_confirm": ("two_forwards", "nothing", "R3"),
    "mxfp4_confirm": ("small_rate", "dense, then rounded", "four bits, stochastic"),
    "sinks_confirm": ("shifted_sinks", "all gradients", "a trainer without sinks"),
}
PAGES = {
    "mxfp4": "mxfp4_trained.md",
    "router": "router_trained.md",
    "router_confirm": "confirmed.md",
    "mxfp4_confirm": "confirmed.md",
    "sinks_confirm": "confirmed.md",
}


def copy_results(name, folder):
    stored = RESULTS / "studies" / f"{name}.jsonl.gz"
    assert stored.stat().st_size < 5e6
    (folder / stored.name).write_bytes(stored.read_bytes())
    return ResultsStore(folder / f"{name}.jsonl")


def test_each_study_with_results_has_a_cell():
    stored = {path.name.split(".")[0] for path in (RESULTS / "studies").glob("*.jsonl.gz")}
    assert stored & STUDIES.keys() == CELLS.keys()


@pytest.mark.parametrize("name", CELLS)
def test_a_page_is_made_from_stored_results(name, tmp_path):
    copy_results(name, tmp_path)
    page, copy = RESULTS / PAGES.get(name, f"{name}.md"), tmp_path / "page.md"
    copy.write_text(
        re.sub(rf"(<!-- {name}: \w+ -->).*?(<!-- end -->)", r"\1\2", page.read_text(), flags=re.S)
    )
    assert command.main([name, "--out", str(tmp_path), "--page", str(copy)]) == 0
    assert copy.read_text() == page.read_text()
    assert not (tmp_path / f"{name}.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_trained_anew_is_in_its_interval(name, tmp_path):
    """The mean difference of two seeds, where 95 % of such means are by the stored runs.

    Runs are not the stored ones again: another compiler, or other flags, round otherwise.
    """
    study, (bed_name, *names) = STUDIES[name], CELLS[name]
    bed, runs = study.beds[bed_name], BedRuns([bed_name], study.seeds, study.steps)
    store = copy_results(name, tmp_path)
    n_stored = len(store)
    comparisons = run_bed(study, runs, bed_name, store=store, folder=tmp_path)
    assert len(store) == n_stored
    cells = {c.contender.name: c for c in comparisons}
    pair = [cells[contender] for contender in names]
    _, stored = compare_values(pair, [c.values for c in pair])

    def train(comparison, n):
        programs = study.make_programs(bed, study.steps, comparison.contender.settings)
        seed = study.first_seed + n
        weights = study.load_weights(bed, seed, tmp_path, False)
        return study.train(programs, seed, weights, comparison.chosen[n].rate)["end"]

    anew = [[train(c, n) for n in range(2)] for c in pair]
    width = (stored.difference.high - stored.difference.low) / 2
    width *= np.sqrt(study.seeds * (1 / study.seeds + 1 / 2))
    assert abs(np.diff(anew, axis=0).mean() - stored.difference.mean) < width
