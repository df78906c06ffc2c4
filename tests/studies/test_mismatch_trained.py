# SPDX-License-Identifier: Apache-2.0
"""The trained mismatch study: its contenders, what they share, diverged runs, its tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import init_params
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.study.contenders import ChosenRate, Comparison, Contender, compare_values
from studies import mismatch_trained
from studies.mismatch_bed import mismatch_config
from studies.mismatch_report import compare_engines, format_cells, format_findings, plot_cells
from studies.mismatch_trained import (
    CLEAN,
    MISMATCH,
    MISMATCH_BEDS,
    MismatchBed,
    list_mismatch_contenders,
    make_mismatch_programs,
    noisy,
    train_on_mismatch_bed,
)
from studies.transitions import Transitions


def test_every_contender_has_an_algorithm():
    changes = set()
    for bed in MISMATCH_BEDS.values():
        contenders = list_mismatch_contenders(bed)
        assert contenders[0].name == "no mismatch, none"
        for contender in contenders:
            engine, *settings = contender.settings
            assert contender.name.startswith(engine.removeprefix("engine="))
            changes.add((*bed.settings, *settings))
    for settings in changes:
        algorithm_from_config(mismatch_config(6, 24, *settings))


def test_contenders_of_one_length_share_programs(monkeypatch):
    made = []

    def make_program(length, steps, settings, fields):
        made.append((length, steps, settings, fields))
        return None, None

    monkeypatch.setattr(mismatch_trained, "make_program", make_program)
    bed = MISMATCH_BEDS["tokens128"]
    programs = [make_mismatch_programs(bed, 24, c.settings) for c in list_mismatch_contenders(bed)]
    assert len(set(made)) == 2 and len(made) == 20
    assert (
        len(
            {
                (float(p.engine.mismatch), p.correction, key)
                for p, key in zip(programs, made, strict=True)
            }
        )
        == 20
    )


def test_an_errors_successor_can_be_right():
    task = Transitions(3)
    prompts, answers = task.sample_prompts(np.random.default_rng(0), 500)
    prompts_BT = jnp.asarray(np.array([p.tokens for p in prompts], np.int32))
    is_right_BT = np.asarray(task.find_right_tokens(prompts_BT, jnp.asarray(answers)))
    # Half of the transitions, and an eighth of the random ones.
    assert is_right_BT.mean() == pytest.approx(0.5 + 0.5 / 8, abs=0.04)
    symbol, state = (prompts_BT[:, i] for i in (1, 2))
    first = task.next_tokens[symbol, state]
    chain = [first, (task.next_tokens[symbol, first] + 1 - 4) % 8 + 4]
    chain.append(task.next_tokens[symbol, chain[1]])
    tokens_BT = jnp.asarray(np.stack(chain, axis=1))
    wrong = np.asarray(task.find_right_tokens(prompts_BT, tokens_BT))
    assert wrong[:, 0].all() and not wrong[:, 1].any() and wrong[:, 2].all()
    symbols_BT = jnp.zeros_like(tokens_BT)
    assert not np.asarray(task.find_right_tokens(prompts_BT, symbols_BT)).any()


@pytest.mark.slow
def test_a_diverged_run_ends_at_zero():
    bed = MismatchBed("small", 5, (CLEAN, noisy(0.1)), 1.0)
    none = list_mismatch_contenders(bed)[0]
    programs = make_mismatch_programs(bed, 2, none.settings)
    params = init_params(jax.random.key(0), programs.bed.cfg.model)
    metrics = train_on_mismatch_bed(programs, 0, params, 1e-3)
    assert metrics["start"] > 0.0 and 0.0 < metrics["end"] < 1.0
    diverged = train_on_mismatch_bed(programs, 0, params, float("nan"))
    assert diverged["start"] == metrics["start"] and diverged["end"] == 0.0


def comparisons_of(values):
    runs = [
        Comparison(
            Contender(name),
            (ChosenRate(None),),
            list(row),
            [{"mismatch": 0.1, "ess": 0.5, "start": 0.2}] * len(row),
        )
        for name, row in values.items()
    ]
    return compare_values(runs, [run.values for run in runs])


def test_corrections_are_compared_with_their_engines_none(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.01, (4, 8))
    values = {
        "no mismatch, none": 0.8 + noise[0],
        "noise 0.1, none": 0.6 + noise[1],
        "noise 0.1, token IS": 0.7 + noise[2],
        "noise 0.1, sequence IS": np.where(np.arange(8) < 2, 0.0, 0.6) + noise[3],
    }
    results = {"tokens6": comparisons_of(values)}
    engines = compare_engines(results["tokens6"])
    assert [list(cells.gains) for cells in engines.values()] == [[], ["token IS", "sequence IS"]]
    gain = engines["noise 0.1"].gains["token IS"].difference
    assert gain is not None and gain.mean == pytest.approx(0.1, abs=0.02)
    text = format_cells(results)
    row = next(line for line in text.splitlines() if "| noise 0.1 |" in line)
    assert "**-0.2" in row and "**+0.1" in row or "**+0.09" in row
    assert "2 collapsed" in row
    cost, gain, *_ = format_findings(results).splitlines()
    assert "`tokens6`, noise 0.1: -0.2" in cost and "`tokens6`, noise 0.1, token IS: +0." in gain
    assert "shown nowhere" not in cost + gain and "sequence IS" not in gain
    plot_cells(results, tmp_path / "cells.png")
    assert (tmp_path / "cells.png").read_bytes().startswith(b"\x89PNG")


def test_p_is_corrected_over_a_bed():
    # One gain of p near 0.02 among twelve corrections of as many engines is no verdict.
    rng = np.random.default_rng(1)
    values = {}
    for engine in range(12):
        values[f"noise {engine}, none"] = rng.normal(0.5, 0.05, 8)
        shift = 0.08 if engine == 3 else 0.0
        values[f"noise {engine}, token IS"] = rng.normal(0.5 + shift, 0.05, 8)
    gains = [cells.gains["token IS"] for cells in compare_engines(comparisons_of(values)).values()]
    assert min(gain.p_value for gain in gains) == gains[3].p_value < 0.05
    assert gains[3].corrected_p_value == pytest.approx(12 * gains[3].p_value)


def test_the_estimate_weighs_each_beds_runs():
    seconds = [bed.run_seconds for bed in MISMATCH_BEDS.values()]
    assert min(seconds) < MISMATCH.run_seconds < max(seconds)
