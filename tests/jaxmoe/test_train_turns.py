# SPDX-License-Identifier: Apache-2.0
"""The rooms of tiny_turns.py: what they pay, and a run whose turns have their own credit."""

import json

import numpy as np
import pytest

from jaxmoe.configs.tiny_turns import DOORS, Rooms, ask_for_way, demonstrate_doors
from jaxmoe.data.rows import Message, Row
from jaxmoe.environments.step_check import check_step
from jaxmoe.observe.metrics import read_metrics
from tests.jaxmoe import commands

QUICK = {
    "data.train_rows": 64,
    "data.held_out_rows": 8,
    "warmup.steps": 30,
    "warmup.lr": 1e-2,
    "model.d_model": 32,
    "model.d_expert": 24,
    "model.n_experts": 4,
    "rollout.sequences_per_step": 32,
    "steps": 2,
    "eval.every_steps": 2,
    "save.every_steps": 1,
}


def test_rooms_pay_in_the_goal_alone():
    rooms = Rooms()
    _, info = rooms.reset(Row("7 1", "1"), seed=0)
    assert info["state_key"] == 7
    wrong = next(door for door in "abc" if door != DOORS[7])
    results = [
        check_step(rooms.step([Message("assistant", door, channel="final")]))
        for door in (wrong, DOORS[7], "hm", DOORS[0])
    ]
    assert [r.reward for r in results] == [0, 0, 0, 1]
    assert [r.terminated for r in results] == [False, False, False, True]
    keys = [r.state_key for r in results]
    assert keys[1] == keys[2] and len({*keys}) == 3  # what is no door changes no room


def test_every_way_has_one_to_three_rooms():
    for number in range(200):
        row = ask_for_way(Row(f"{number}", "x"))
        start, goal = map(int, row.question.split())
        assert (goal - start) % len(DOORS) in (1, 2, 3) and row.answer == str(goal)
        messages = demonstrate_doors(row)
        assert messages == demonstrate_doors(row)
        roles = [message.role for message in messages]
        turns = roles.count("assistant")
        assert 1 <= turns <= 3 and roles == (["assistant", "user"] * turns)[:-1]


@pytest.mark.slow  # a command, most of it compiling
def test_a_run_has_credit_by_turn(tmp_path):
    args = commands.command(tmp_path / "run", config="tiny_turns.py", sizes=QUICK)
    code, out, err = commands.finish(args)
    assert code == 0, out + err
    rows = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["stage"] == "rl"]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["train_rollout_logprob_abs_diff_max"] <= 1e-5 and row["turns/max"] >= 3
    paid_steps = [row for row in steps if row["reward/mean"] > 0]
    assert paid_steps
    for row in paid_steps:
        paid = [row[f"reward/turn/{n}"] for n in range(1, row["turns/max"] + 1)]
        assert 0 < max(paid) <= 1
    samples = (tmp_path / "run/samples.jsonl").read_text().splitlines()
    groups = [row for row in map(json.loads, samples) if row["kind"] == "group"]
    answers = [answer for row in groups for answer in row["samples"]]
    by_turn = [a["turn_advantages"] for a in answers if "turn_advantages" in a]
    assert by_turn and all(len(x) > 1 and np.isfinite(x).all() for x in by_turn)
