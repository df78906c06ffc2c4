# SPDX-License-Identifier: Apache-2.0
"""The loop when something breaks, dies or is stopped: saved, resumed, nothing lost or doubled."""

import json
import threading
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from scripted import SOON, STEPS, Run, Scripted, counting_step, lines, stream

from jaxmoe.checkpoint import store
from jaxmoe.cli import Stopped, StopRequest
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.observe.metrics import MetricsLog, read_samples
from jaxmoe.observe.plots import plot_run
from jaxmoe.run.job import Job


class Bomb(BaseException):
    """A death nobody handles."""


def log_that_dies(at_step):
    """A log with which the run ends at once, after this step and before it is logged."""

    class DyingLog(MetricsLog):
        def write(self, stage, step, metrics, **named):
            if step == at_step:
                raise Bomb
            super().write(stage, step, metrics, **named)

    return DyingLog


def failing(call, number, error=None):
    """Fails in the number-th call of its kind, once."""
    calls = {"load": 0, "sample": 0, "score": 0}

    def script(script_step, engine):
        calls[script_step] += 1
        if script_step == call and calls[script_step] == number:
            raise error or EngineError("the engine broke.")

    return script


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    "call, number, saved",
    [("sample", 4, 3), ("load", 4, 3), ("score", 4, 3), ("score", 6, 6)],
    ids=["sampling", "publishing", "evaluating", "evaluating at the end"],
)
def test_a_broken_engine_saves_the_last_complete_step(tmp_path, ahead, call, number, saved):
    run = Run(tmp_path, Scripted(failing(call, number)), ahead)
    with pytest.raises(EngineError) as error:
        run()
    step = store.find_latest_step(tmp_path / "checkpoints") - 1_000_000
    if ahead and call == "sample":  # seen in the trainer as soon as it looks, so perhaps earlier
        assert 1 <= step <= saved
    else:
        assert step == saved
    message = f"the engine broke. saved rl step {step} in {tmp_path}; the same command resumes."
    assert str(error.value) == message
    resumed = Run(tmp_path, Scripted(), ahead)
    assert resumed() == STEPS
    assert run.trained[:step] + resumed.trained == stream()
    assert_whole(tmp_path)


def assert_whole(work):
    """A line for every step, and each evaluation made once."""
    rows = lines(work)
    trained = [row["step"] for row in rows if "loss" in row]
    scored = [row["step"] for row in rows if "eval/accuracy" in row]
    assert (trained, scored) == (list(range(1, STEPS + 1)), [0, 3, 6])


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("call", "number"), [("load", 4), ("score", 3)])
def test_a_bug_has_its_traceback_and_saves_runs(tmp_path, ahead, call, number):
    bug = KeyError("in somebody's reward")
    run = Run(tmp_path, Scripted(failing(call, number, bug)), ahead)
    with pytest.raises(KeyError) as error:
        run()
    assert error.value is bug
    assert bug.__notes__ == [f"saved rl step 3 in {tmp_path}; the same command resumes."]
    resumed = Run(tmp_path, Scripted(), ahead)
    assert resumed() == STEPS
    assert run.trained[:3] + resumed.trained == stream()
    assert_whole(tmp_path)


def test_a_failing_step_is_reported_before_its_consequences(tmp_path, monkeypatch):
    """It has given the weights away, so that nothing newer than the last checkpoint is there."""

    steps, host = [], Job.fetch_metrics

    def fails(job, step_fn, metrics, step, **options):
        steps.append(metrics)
        if len(steps) == 4:
            raise MemoryError("no room for the step")
        return host(job, step_fn, metrics, step, **options)

    monkeypatch.setattr(Job, "fetch_metrics", fails)
    with pytest.raises(MemoryError, match="no room for the step") as error:
        Run(tmp_path, Scripted(), changes=("save.every_steps=2",))()
    (note,) = error.value.__notes__
    assert note == "The failed step deleted the weights: resume from the last checkpoint."
    assert store.find_latest_step(tmp_path / "checkpoints") == 1_000_002


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_refused_save_is_repeated_once(tmp_path, monkeypatch, capsys, refusals):
    tries, save = [], store.save_checkpoint

    def refuses(directory, step, *args, **named):
        tries.append(step)
        if step == 1_000_004 and tries.count(step) <= refusals:
            raise store.CheckpointError("the disk has no inodes left.")
        save(directory, step, *args, **named)

    monkeypatch.setattr(store, "save_checkpoint", refuses)
    run = Run(tmp_path, Scripted(), changes=("save.every_steps=2",))
    if refusals == 1:
        assert run() == STEPS
        assert store.find_latest_step(tmp_path / "checkpoints") == 1_000_006
    else:
        with pytest.raises(store.CheckpointError, match="^the disk has no inodes left.$"):
            run()
        assert store.find_latest_step(tmp_path / "checkpoints") == 1_000_002
    assert tries.count(1_000_004) == 2
    err = capsys.readouterr().err
    assert err.count("! the disk has no inodes left. Retrying once.\n") == 1


def gated_step(state, batch, *arguments, **options):
    """The gate closes at the third batch, and leaves the weights as they are."""
    after, numbers, stats = counting_step(state, batch, *arguments)
    is_closed = state.params.policy["w"] == 2.0
    params = jax.tree.map(partial(jnp.where, is_closed), state.params, after.params)
    told = "train_rollout_logprob_abs_diff_max", "rollout_corr/k3_kl", "rollout_corr/ess"
    numbers |= {name: jnp.ones(()) for name in told} | {
        "gate/closed": is_closed.astype(jnp.float32)
    }
    return replace(after, params=params), numbers, stats


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_closed_gate_saves_and_resumes_once_opened(tmp_path, monkeypatch, ahead):
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="^rl step 3: engine and"):
        patch.setattr("scripted.counting_step", gated_step)
        Run(tmp_path, Scripted(), ahead)()
    assert store.find_latest_step(tmp_path / "checkpoints") == 1_000_002
    resumed = Run(tmp_path, Scripted(), ahead)
    assert resumed() == STEPS and resumed.trained == stream()[2:]
    assert_whole(tmp_path)


def test_plots_that_the_disk_refuses_end_no_run(tmp_path, capsys):
    (tmp_path / "plots").symlink_to(tmp_path)

    def plot_last(rows, work, *, panels, score):
        if panels:  # at the end of the run
            plot_run(rows, work, panels=panels, score=score)

    assert Run(tmp_path, Scripted(), plot=plot_last)() == STEPS
    err = capsys.readouterr().err
    assert f"! no plots: {tmp_path / 'plots'} must be" in err and err.count("\n") == 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_engine_failing_before_step_one_saves_nothing(tmp_path, ahead):
    with pytest.raises(EngineError, match="broke. no rl step was made in .*begins it"):
        Run(tmp_path, Scripted(failing("sample", 1)), ahead)()
    resumed = Run(tmp_path, Scripted(), ahead)
    resumed()
    assert resumed.trained == stream()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("offset", [-2, 1])
def test_a_token_of_an_impossible_version_is_untrained(tmp_path, ahead, offset):
    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 4:
            engine.claimed_version = 3 + offset

    run = Run(tmp_path, Scripted(script), ahead)
    with pytest.raises(EngineError, match="must be sampled by weight version.*saved rl step 3"):
        run()
    assert run.trained == stream(3)


def test_synchronous_runs_refuse_an_older_version(tmp_path):
    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 4:
            engine.claimed_version = 2

    with pytest.raises(
        EngineError, match="must be sampled by weight version 3,.*token 5 carries version 2"
    ):
        Run(tmp_path, Scripted(script))()


def test_a_threads_mistake_is_a_config_error(tmp_path):
    changes = ("data.max_prompt_tokens=3",)
    with pytest.raises(ConfigError, match="Try --set data.max_prompt_tokens"):
        Run(tmp_path, Scripted(), 1, changes=changes)()


def long_rows(folder):
    """Settings of a run over a file in which every eighth prompt is too long."""
    rows = [{"question": f"{i}" + "?" * 80 * (i % 8 == 0), "answer": "1"} for i in range(64)]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = ("data.train_rows=48", "data.held_out_rows=4", "data.max_prompt_tokens=40")
    return (f"data.task={folder / 'q.jsonl'}", "data.options={}", *sizes)


def test_a_too_long_prompt_advises_no_resume(tmp_path):
    """It would stop at the same row."""
    with pytest.raises(ConfigError, match="max_prompt_tokens=8[12], or --set.*=drop") as caught:
        Run(tmp_path / "run", Scripted(), changes=long_rows(tmp_path))()
    assert "after the fix, the command" in str(caught.value)
    assert "the same command" not in str(caught.value)


def test_dropped_long_prompts_are_counted_and_resume_equally(tmp_path):
    changes = (*long_rows(tmp_path), "data.overlong_prompts=drop", "save.every_steps=2")
    through = Run(tmp_path / "one", Scripted(), changes=changes)
    through()
    assert {row["data/dropped_prompts"] for row in lines(tmp_path / "one")[1:]} == {8}
    first = Run(tmp_path / "two", Scripted(), changes=(*changes, "steps=2"))
    resumed = Run(tmp_path / "two", Scripted(), changes=changes)
    first(), resumed()
    assert first.trained + resumed.trained == through.trained


@pytest.mark.slow
@pytest.mark.parametrize("ahead, dies_at", [(1, 4), (2, 2), (3, 5)])
def test_a_dying_run_loses_or_doubles_no_prompt(tmp_path, ahead, dies_at):
    """It dies with batches ready and under way, and saves nothing on the way out."""
    changes = ("save.every_steps=2",)
    run = Run(tmp_path, Scripted(), ahead, changes=changes, log=log_that_dies(dies_at))
    with pytest.raises(Bomb):
        run()
    saved = 2 * ((dies_at - 1) // 2)
    resumed = Run(tmp_path, Scripted(), ahead, changes=changes)
    assert resumed() == STEPS
    assert run.trained == stream(dies_at) and len(run.engine.sampled) >= dies_at
    assert resumed.trained == stream()[saved:]
    assert [row["step"] for row in lines(tmp_path)] == list(range(STEPS + 1))


def test_each_step_logs_epoch_and_learning_rate(tmp_path):
    changes = ("optim.lr=0.01", "optim.lr_warmup_steps=4", "data.train_rows=6")
    Run(tmp_path, Scripted(), changes=changes)()
    rows = lines(tmp_path)[1:]
    assert [row["data/epoch"] for row in rows] == [step / 2 for step in range(1, STEPS + 1)]
    rates = [0.01 * min(1.0, x) for x in (0.25, 0.4375, 0.625, 0.8125, 1.0, 1.0)]
    assert [row["optim/lr"] for row in rows] == pytest.approx(rates)


def test_a_skipped_batch_leaves_the_learning_rate(tmp_path, monkeypatch):
    """The gate is closed in the steps 2 and 3."""

    def gated_step(state, batch, *rest, **options):
        new, numbers, stats = counting_step(state, batch, *rest, **options)
        closed = (batch.shared["step"] == 1) | (batch.shared["step"] == 2)
        numbers["gate/closed"] = jnp.where(closed, 1.0, 0.0)
        return replace(new, step=jnp.where(closed, state.step, new.step)), numbers, stats

    monkeypatch.setattr("scripted.counting_step", gated_step)
    changes = ("optim.lr=0.01", "optim.lr_warmup_steps=4", "gate.k3=1.0", "gate.skip=True")
    Run(tmp_path, Scripted(), changes=changes)()
    rates = [0.01 * x for x in (0.25, 0.4375, 0.4375, 0.4375, 0.625, 0.8125)]
    assert [row["optim/lr"] for row in lines(tmp_path)[1:]] == pytest.approx(rates)


def test_redrawn_groups_advance_the_stream_on_resume(tmp_path):
    """Every group's rewards are equal here, so each step makes all its draws."""
    changes = ("rollout.max_gen_batches=2", "save.every_steps=2")
    uninterrupted = Run(tmp_path / "whole", Scripted(), 2, changes=changes)
    uninterrupted()
    assert [ids for ids, _ in uninterrupted.engine.sampled] == stream(2 * STEPS)
    parts = Run(tmp_path / "parts", Scripted(), 2, changes=(*changes, "steps=4"))
    resumed = Run(tmp_path / "parts", Scripted(), 2, changes=changes)
    parts()
    resumed()
    assert parts.trained + resumed.trained == uninterrupted.trained


def test_a_stop_while_waiting_saves_and_ends_sampling(tmp_path):
    stop = StopRequest()

    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 3:
            threading.Timer(0.05, lambda: setattr(stop, "signal", 15)).start()
            assert engine.closed.wait(SOON)
            raise EngineError("closed")

    run = Run(tmp_path, Scripted(script), 1, stop)
    start = time.perf_counter()
    with pytest.raises(Stopped, match="SIGTERM: saved rl step 2 in .*; the same command resumes"):
        run()
    assert time.perf_counter() - start < SOON / 2
    resumed = Run(tmp_path, Scripted(), 1)
    resumed()
    assert run.trained + resumed.trained == stream()


def test_a_stop_before_the_first_batch_saves_nothing(tmp_path):
    stop = StopRequest()

    def script(call, engine):
        if call == "sample":
            stop.signal = 2
            assert engine.closed.wait(SOON)
            raise EngineError("closed")

    with pytest.raises(Stopped, match="SIGINT: no rl step was made"):
        Run(tmp_path, Scripted(script), 1, stop)()
    Run(tmp_path, Scripted(), 1)()
    assert [row["step"] for row in lines(tmp_path)] == list(range(STEPS + 1))


def test_answers_are_recorded_once_for_every_step(tmp_path):
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    Run(uninterrupted, Scripted())()
    changes = ("save.every_steps=2",)
    with pytest.raises(EngineError):
        Run(parts, Scripted(failing("load", 5)), changes=changes)()
    with pytest.raises(Bomb):  # it dies after step 5, behind its last checkpoint
        Run(parts, Scripted(), changes=changes, log=log_that_dies(5))()
    Run(parts, Scripted(), changes=changes)()

    def recorded(work):
        rows = read_samples(work / "samples.jsonl")
        return [(r["step"], r["kind"], r["row"]) for r in rows]

    assert len(recorded(parts)) == len(set(recorded(parts)))
    held_out = [x for x in recorded(parts) if x[1] == "held_out"]
    assert held_out == [x for x in recorded(uninterrupted) if x[1] == "held_out"]
    assert {x[0] for x in recorded(uninterrupted) if x[1] == "group"} == {3, 6}
    assert {x[0] for x in recorded(parts) if x[1] == "group"} == {2, 3, 4, 6}
