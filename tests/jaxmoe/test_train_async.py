# SPDX-License-Identifier: Apache-2.0
"""Batches made in turn and ahead: which prompts, which weights, and what the log says of it."""

import time

import pytest
from scripted import SOON, STEPS, Run, Scripted, lines, stream


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_prompt_is_trained_once_in_order(tmp_path, ahead):
    run = Run(tmp_path, Scripted(), ahead)
    assert run() == STEPS
    assert run.trained == [ids for ids, _ in run.engine.sampled] == stream()
    assert run.engine.loaded == list(range(STEPS + 1))
    assert [row["step"] for row in lines(tmp_path)] == list(range(STEPS + 1))
    assert ["eval/accuracy" in row for row in lines(tmp_path)] == [
        step in (0, 3, STEPS) for step in range(STEPS + 1)
    ]


def test_async_and_sync_request_the_same_samples(tmp_path):
    runs = [Run(tmp_path / str(n), Scripted(), n) for n in (0, 2)]
    for run in runs:
        run()
    assert runs[0].engine.sampled == runs[1].engine.sampled


def test_in_turn_nothing_is_counted_that_cannot_happen(tmp_path):
    Run(tmp_path, Scripted())()
    names = set().union(*lines(tmp_path))
    assert not {
        n for n in names if n.startswith(("staleness", "time/wait", "rollout/ready_batches"))
    }


@pytest.mark.parametrize("ahead", [0, 1])
def test_incidents_of_the_engine_are_in_their_step(tmp_path, ahead):
    def script(call, engine):
        if call == "load" and engine.version in (1, 2):  # version 3 follows 2
            engine.incidents += [f"a hiccup after {engine.version}", "another"]

    Run(tmp_path, Scripted(script), ahead)()
    rows = lines(tmp_path)[1:]
    assert [row["rollout/incidents"] for row in rows] == [0, 2, 2, 0, 0, 0]
    _, _, rule, *incidents = rows[2]["alerts"]  # the first: every reward is 0, every answer cut off
    assert rule.startswith("rollout/incidents is 2 (> 0); check first: the alerts")
    assert incidents == ["a hiccup after 2", "another"]
    # every reward is 0, which is an alert from the third step on
    assert (len(rows[0]["alerts"]), len(rows[3]["alerts"])) == (1, 2)


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_slow_trainer_gets_tokens_within_the_staleness(tmp_path, ahead):
    engine = Scripted()

    def script(call, engine):
        if call == "load":  # the engine runs as far ahead as it may
            begun = min(STEPS, engine.version + 1 + ahead) if engine.version >= 0 else 0
            end = time.perf_counter() + SOON
            while engine.answered < begun and time.perf_counter() < end:
                time.sleep(0.001)

    engine.script = script
    Run(tmp_path, engine, ahead)()
    rows = lines(tmp_path)[1:]
    assert [row["staleness/max"] for row in rows] == [min(k, ahead) for k in range(STEPS)]
    assert all(row["staleness/mean"] == row["staleness/max"] for row in rows)
    assert all(row["staleness/mixed_frac"] == 0.0 for row in rows)
    for row in rows:
        assert row["time/wait_for_rollouts_s"] >= 0 and row["time/wait_for_trainer_s"] >= 0
        assert (
            0 <= row["rollout/overlap_frac"] <= 1 and 0 <= row["rollout/ready_batches"] <= 1 + ahead
        )


def test_rollouts_that_two_versions_drew_are_counted(tmp_path):
    """Weights change while the second batch is under way: its first tokens are older."""

    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 2:
            end = time.perf_counter() + SOON
            while engine.version == 0 and time.perf_counter() < end:
                time.sleep(0.001)

    Run(tmp_path, Scripted(script), 1)()
    second = lines(tmp_path)[2]
    assert second["staleness/mixed_frac"] == 1.0 and second["staleness/max"] == 1
    assert 0 < second["staleness/mean"] < 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_evaluation_has_exclusive_engine_and_newest_weights(tmp_path, ahead):
    def script(call, engine):
        time.sleep(0.005)
        if call == "score":
            assert engine.under_way == 1

    engine = Scripted(script)
    Run(tmp_path, engine, ahead, changes=("eval.every_steps=1",))()
    assert engine.most_at_once == 1
