# SPDX-License-Identifier: Apache-2.0
"""A walk through rooms: what it pays, and a run whose turns have their own credit."""

import json

import numpy as np
import pytest

from jaxmoe.data.rows import Message, Row
from jaxmoe.environments.step_check import check_step
from jaxmoe.observe.metrics import read_metrics
from tests.jaxmoe import commands, walk

QUICK = {
    "data.train_rows": 64,
    "data.held_out_rows": 8,
    "warmup.steps": 30,
    "warmup.lr": 1e-2,
    "warmup.sequences_per_step": 16,
    "model.d_model": 32,
    "model.d_expert": 24,
    "model.n_experts": 4,
    "rollout.sequences_per_step": 16,
    "rollout.samples_per_prompt": 8,
    "optim.tokens_per_microbatch": 0,
    "steps": 2,
    "eval.every_steps": 2,
    "save.every_steps": 1,
}


def test_a_walk_pays_in_the_goal_alone():
    environment = walk.Walk()
    _, info = environment.reset(Row("0 2", "2"), seed=0)
    assert info["state_key"] == 0
    results = [
        check_step(environment.step([Message("assistant", step, channel="final")]))
        for step in ("n", "e", "hm", "e")
    ]
    assert [r.reward for r in results] == [0, 0, 0, 1]
    assert [r.terminated for r in results] == [False, False, False, True]
    keys = [r.state_key for r in results]
    assert keys[1] == keys[2] and len({*keys}) == 3  # a wall and no step change no room


def test_every_walk_needs_two_steps_and_few_turns():
    for number in range(200):
        row = walk.ask_for_walk(Row(f"{number}", "x"))
        start, goal = map(int, row.question.split())
        distance = abs(start % 3 - goal % 3) + abs(start // 3 - goal // 3)
        assert 2 <= distance <= 4 and row.answer == str(goal)
        messages = walk.demonstrate_steps(row)
        assert messages == walk.demonstrate_steps(row) and len(messages) == 5


@pytest.mark.slow  # a command, most of it compiling
def test_a_run_has_credit_by_turn(tmp_path):
    args = commands.command(tmp_path / "run", config="tests/jaxmoe/walk.py", sizes=QUICK)
    code, out, err = commands.finish(args)
    assert code == 0, out + err
    rows = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["stage"] == "rl"]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["train_rollout_logprob_abs_diff_max"] <= 1e-5 and row["turns/max"] >= 3
        paid = [row[f"reward/turn/{n}"] for n in range(1, row["turns/max"] + 1)]
        assert paid[0] == 0.0 and 0 < max(paid) <= 1  # a walk has two steps or more
    samples = (tmp_path / "run/samples.jsonl").read_text().splitlines()
    groups = [row for row in map(json.loads, samples) if row["kind"] == "group"]
    answers = [answer for row in groups for answer in row["samples"]]
    by_turn = [a["turn_advantages"] for a in answers if "turn_advantages" in a]
    assert by_turn and all(len(x) > 1 and np.isfinite(x).all() for x in by_turn)
