# SPDX-License-Identifier: Apache-2.0
"""The doctor names experts that are missing, impossible, or those of other tokens or layers.

The engine's log-probs are right throughout: only what it reports of its experts is wrong.
"""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.reconcile.compare import explain_gap
from jaxmoe.reconcile.reported_experts import (
    check_reported_experts,
    find_misplaced_experts,
    measure_agreement,
)
from tests.jaxmoe.reconcile.faults import CFG, COOL, RUN, Fault, make_rollouts, make_weights
from tests.jaxmoe.reconcile.peer import Peer


def change_experts(change):
    """The rollouts of an engine that reports its experts otherwise than it should."""
    return [replace(r, routed_experts=change(r)) for r in make_rollouts(Fault(), 0)]


def examine(rollouts):
    rollouts, findings = check_reported_experts(rollouts, CFG, needed=True)
    return explain_gap(rollouts, make_weights(0), CFG, COOL, run=RUN, findings=findings)


def roll(amount, axis):
    return lambda r: np.roll(r.routed_experts, amount, axis=axis)


def of_another_row(r):
    rng = np.random.default_rng(len(r.tokens) + r.prompt.tokens[0])
    shape = (*r.routed_experts.shape[:2], CFG.n_experts)
    return rng.random(shape).argsort(-1)[..., : CFG.experts_per_token].astype(np.int8)


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (roll(1, 0), "shifted_experts", "they are those of the token before it"),
        (roll(-1, 0), "shifted_experts", "they are those of the token after it"),
        (roll(1, 1), "shifted_experts", "they are those of the layer"),
        (of_another_row, "unrelated_experts", "log-probs agree with the trainer's, and experts"),
    ],
    ids=["one token late", "one token early", "another layer", "of no token"],
)
def test_misplaced_experts_are_named_although_log_probs_agree(change, name, words):
    report = examine(change_experts(change))
    (finding,) = report.findings
    assert finding.name == name and words in finding.actual and not report.agrees


@pytest.mark.parametrize("fault", [Fault(), Fault(Peer(switch=0.1))])
def test_a_few_different_experts_are_no_finding(fault):
    assert examine(make_rollouts(fault, 0)).findings == []


def zeros(rows):
    def change(r):
        experts = r.routed_experts.copy()
        experts[rows(r)] = 0
        return experts

    return change


def in_prompt(r):
    return slice(len(r.prompt.tokens))


@pytest.mark.parametrize(
    ("rows", "shares", "fix"),
    [
        (in_prompt, "100% of the prompts' tokens and 0% of the answers'", "prefix-caching"),
        (lambda r: slice(None, None, 2), "52% of the prompts' tokens and 50%", "--moe-backend"),
    ],
    ids=["cached prompts", "every second row"],
)
def test_rows_of_zeros_are_named_with_advice(rows, shares, fix):
    report = examine(change_experts(zeros(rows)))
    (finding,) = report.findings
    assert finding.name == "unknown_experts" and fix in finding.fix
    assert "rows that no router can have chosen" in finding.actual
    assert shares in finding.actual and "replay falls back" in finding.actual
    assert report.verdict.kind == "agree" and not report.agrees


def test_unknown_experts_are_named_and_not_compared():
    report = examine(change_experts(lambda r: np.zeros_like(r.routed_experts)))
    assert [f.name for f in report.findings] == ["unknown_experts"] and report.layers == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: None, "it has none"),
        (lambda r: r.routed_experts[:-1], "must have shape"),
        (lambda r: r.routed_experts[:, :1], "must be of 2 layers"),
        (lambda r: r.routed_experts[..., :1], "must be of 2 layers"),
        (lambda r: r.routed_experts.astype(float), "whole numbers, got float64"),
        (lambda r: r.routed_experts + CFG.n_experts, "must be from 0 to"),
    ],
)
def test_unreplayable_experts_are_named_and_log_probs_judged(change, words):
    report = examine(change_experts(change))
    (finding,) = report.findings
    assert finding.name == "wrong_experts" and words in finding.actual
    assert report.verdict.kind == "agree" and report.layers == []


def test_missing_experts_are_fine_without_replay():
    rollouts = change_experts(lambda r: None)
    assert check_reported_experts(rollouts, CFG, needed=False) == (rollouts, [])


def test_agreement_is_1_for_equal_0_for_chance():
    rng = np.random.default_rng(0)
    popularity_E = np.array([8.0, 4.0, 2.0, 1.0, 1.0, 1.0])

    def choose():
        scores = rng.gumbel(size=(3, 50, 40, 6)) + np.log(popularity_E)
        return scores.argsort(-1)[..., -2:]

    chosen, other = choose(), choose()
    assert measure_agreement(chosen, chosen[..., ::-1]) == pytest.approx(1.0)
    assert abs(measure_agreement(chosen, other)) < 0.02
    assert (chosen[..., None] == other[..., None, :]).any(-1).mean() > 0.4  # without the loads
    half = np.where(np.arange(40)[:, None] < 20, chosen, other)
    assert measure_agreement(chosen, half) == pytest.approx(0.5, abs=0.03)
    assert measure_agreement(chosen, np.full_like(chosen, -1)) is None
    assert find_misplaced_experts(chosen, np.full_like(chosen, -1), same_logps=True) == []


def test_unrelated_experts_need_agreeing_log_probs():
    rng = np.random.default_rng(0)
    chosen, other = (rng.random((2, 8, 30, 6)).argsort(-1)[..., :2] for _ in range(2))
    assert find_misplaced_experts(chosen, other, same_logps=False) == []
    (finding,) = find_misplaced_experts(chosen, other, same_logps=True)
    assert finding.name == "unrelated_experts"
