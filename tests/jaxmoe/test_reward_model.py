# SPDX-License-Identifier: Apache-2.0
"""A reward model's value of each token is the advantage: from Python, and from a config."""

import json
from dataclasses import replace

import numpy as np
import pytest
from bigram import make_batch, start, step_of
from scripted import Run, Scripted, counting_step

from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.loss import estimate_advantages

MY_RM = """score = lambda completion_ids: [[t % 7 / 8 for t in ids] for ids in completion_ids]
advantages = lambda rewards_BT: rewards_BT"""
SETTINGS = ("data.rewards=my_rm:score", "loss.advantages=my_rm:advantages")


def test_a_batch_brings_the_values_of_a_reward_model():
    values = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    a = Algorithm(advantages=lambda rm_values_BT: rm_values_BT)
    _, metrics = step_of(a)(start(a), replace(make_batch(), extra={"rm_values_BT": values}))
    mean = pytest.approx(np.abs(values)[make_batch().loss_mask_BT].mean(), rel=1e-5)
    assert float(metrics["policy/advantage_abs_mean"]) == mean


def estimating_step(state, batch, *arguments, algorithm, **options):
    *results, stats = counting_step(state, batch, *arguments)
    advantages_BT = estimate_advantages(batch, algorithm).advantages_BT
    return *results, replace(stats, advantages_BT=advantages_BT)


def test_a_config_brings_them_by_a_reward_function(tmp_path, monkeypatch):
    (tmp_path / "my_rm.py").write_text(MY_RM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("scripted.counting_step", estimating_step)
    Run(tmp_path, Scripted(), changes=SETTINGS)()
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    answers = [x for line in lines for x in json.loads(line).get("samples", [])]
    total = [x["advantage"] * x["length"] for x in answers]
    assert total == pytest.approx([x["reward"] for x in answers], rel=1e-3) and sum(total) > 0
