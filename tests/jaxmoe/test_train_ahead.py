# SPDX-License-Identifier: Apache-2.0
"""The loop around an engine that does as it is told: in turn and ahead, failing, stopped, resumed.

The update is a stand-in that counts; what is real is everything around it.
"""

import json
import threading
import time
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe import train
from jaxmoe.checkpoint import store
from jaxmoe.checkpoint.run import Position, restore_run
from jaxmoe.cli import Stopped, StopRequest
from jaxmoe.config_file import load, override
from jaxmoe.envs.tasks import open_task
from jaxmoe.observe.metrics import MetricsLog
from jaxmoe.records import Rollout, StopReason
from jaxmoe.rl.algorithm import algorithm
from jaxmoe.rl.state import new_state
from jaxmoe.rollout.engine import EngineError

STEPS, SAMPLES, PROMPTS = 6, 2, 3
SOON = 60.0
CFG = override(
    load("tiny.py"), "data.train_rows=64", "data.held_out_rows=4", "warmup.steps=0",
    f"rollout.sequences_per_step={SAMPLES * PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
    "rollout.max_draws=1", f"steps={STEPS}", "eval.every_steps=3", "save.every_steps=100",
    "loss.correction=token_is",
)  # fmt: skip
TX = optax.sgd(1.0)
NUMBERS = (
    "gate/closed", "grad/norm", "loss", "policy/kl_rollout", "train_rollout_logprob_abs_diff"
)  # fmt: skip


def counting_step(state, batch, minibatches, reference, **_):
    """Adds 1 to the weight, so that the weight says which version it is."""
    params = jax.tree.map(lambda w: w + 1.0, state.params)
    return replace(state, params=params), {name: jnp.zeros(()) for name in NUMBERS}


class Bomb(BaseException):
    """A death nobody handles."""


@dataclass
class Scripted:
    """Answers with random tokens by the version it holds; `script` may delay, lie or fail.

    script(call, engine): call is "load", "sample" or "score" (greedy: of an evaluation).
    """

    script: object = lambda call, engine: None
    held: int = -1
    sampled: list = field(default_factory=list)  # (prompt ids, seed) of training's calls
    loaded: list = field(default_factory=list)
    answered: int = 0  # of those
    under_way: int = 0
    most_at_once: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    incidents: list = field(default_factory=list)
    told: int | None = None  # what to claim instead of the version held

    def load(self, params, version):
        self.script("load", self)
        assert int(params["w"]) == version
        self.held = version
        self.loaded.append(version)

    def generate(self, prompts, sampling, *, seed, samples=1):
        training = samples == SAMPLES and seed > 1
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            first = self.held
            if training:
                self.sampled.append((tuple(p.id for p in prompts), seed))
            self.script("sample" if training else "score", self)
            made = [
                self.rollout(p, seed, i, sampling, first)
                for i, p in enumerate(prompts) for _ in range(samples)
            ]  # fmt: skip
            self.answered += training
            return made
        finally:
            self.under_way -= 1

    def rollout(self, prompt, seed, i, sampling, first):
        tokens = np.random.default_rng((seed, i)).integers(97, 123, sampling.max_new_tokens)
        versions = np.full(len(tokens), self.held, np.int32)
        versions[0] = first
        if self.told is not None:
            versions[-1] = self.told
        logp = np.full(len(tokens), -1.0, np.float32)
        return Rollout(prompt, tokens.astype(np.int32), logp, StopReason.MAX_TOKENS, versions)

    def close(self):
        self.closed.set()


@dataclass
class Run:
    """One call of the loop in a folder, and what came of it."""

    work: object
    engine: Scripted
    ahead: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    changes: tuple = ()
    trained: list = field(default_factory=list)  # prompt ids of each batch that was trained on

    def __call__(self, monkeypatch):
        cfg = override(CFG, f"rollout.max_staleness={self.ahead}", *self.changes)
        task, fresh = open_task(cfg), new_state({"w": jnp.zeros(())}, TX)
        at = restore_run(self.work, cfg, {"rl": jax.eval_shape(lambda: fresh)})
        begun = at or Position("warmup", 0, fresh, None, None)  # as run() does: the log starts over
        at = at or Position("rl", 0, fresh, None, None)
        whole = train.make_batch

        def noted(cfg, task, rollouts, rewards):
            self.trained.append(tuple(r.prompt.id for r in rollouts[::SAMPLES]))
            return whole(cfg, task, rollouts, rewards)

        with monkeypatch.context() as patch:
            patch.setattr(train, "rl_step", counting_step)
            patch.setattr(train, "make_batch", noted)
            patch.setattr(train, "plot_run", lambda *_, **__: None)
            with MetricsLog(self.work, stage=begun.stage, step=begun.step) as log:
                desk = train.Desk(cfg, self.work, task, self.engine, log, self.stop)
                state = train.reinforce(desk, at, TX, algorithm(cfg))
        assert not [t for t in threading.enumerate() if t.name == "rollouts"]
        return float(state.params["w"])


def lines(work):
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]


def stream(steps=STEPS):
    data = open_task(CFG).stream(PROMPTS, CFG.seed + 2)
    return [tuple(p.id for p in next(data)) for _ in range(steps)]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_prompt_of_the_stream_is_trained_on_once_in_order(tmp_path, monkeypatch, ahead):
    run = Run(tmp_path, Scripted(), ahead)
    assert run(monkeypatch) == STEPS
    assert run.trained == [ids for ids, _ in run.engine.sampled] == stream()
    assert run.engine.loaded == list(range(STEPS + 1))
    assert [row["step"] for row in lines(tmp_path)] == list(range(STEPS + 1))
    assert ["eval/accuracy" in row for row in lines(tmp_path)] == [
        step in (0, 3, STEPS) for step in range(STEPS + 1)
    ]


def test_ahead_and_in_turn_ask_for_the_same_samples(tmp_path, monkeypatch):
    runs = [Run(tmp_path / str(n), Scripted(), n) for n in (0, 2)]
    for run in runs:
        run(monkeypatch)
    assert runs[0].engine.sampled == runs[1].engine.sampled


def test_in_turn_nothing_is_counted_that_cannot_happen(tmp_path, monkeypatch):
    Run(tmp_path, Scripted())(monkeypatch)
    names = set().union(*lines(tmp_path))
    assert not {n for n in names if n.startswith(("staleness", "time/wait", "rollout/ahead"))}


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_the_engine_mended_stands_in_the_line_of_its_step(tmp_path, monkeypatch, ahead):
    def script(call, engine):
        if call == "load" and engine.held in (1, 2):  # version 3 follows 2
            engine.incidents += [f"a hiccup after {engine.held}", "another"]

    Run(tmp_path, Scripted(script), ahead)(monkeypatch)
    rows = lines(tmp_path)[1:]
    assert [row["rollout/incidents"] for row in rows] == [0, 2, 2, 0, 0, 0]
    _, rule, *told = rows[2]["alerts"]  # the first: every reward is 0
    assert rule.startswith("rollout/incidents is 2 (> 0); look first at the lines")
    assert told == ["a hiccup after 2", "another"]
    assert len(rows[0]["alerts"]) == len(rows[3]["alerts"]) == 1


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_slow_trainer_gets_tokens_as_old_as_allowed_and_the_log_says_so(
    tmp_path, monkeypatch, ahead
):
    engine = Scripted()

    def script(call, engine):
        if call == "load":  # the engine runs as far ahead as it may
            begun = min(STEPS, engine.held + 1 + ahead) if engine.held >= 0 else 0
            end = time.perf_counter() + SOON
            while engine.answered < begun and time.perf_counter() < end:
                time.sleep(0.001)

    engine.script = script
    Run(tmp_path, engine, ahead)(monkeypatch)
    rows = lines(tmp_path)[1:]
    assert [row["staleness/max"] for row in rows] == [min(k, ahead) for k in range(STEPS)]
    assert all(row["staleness/mean"] == row["staleness/max"] for row in rows)
    assert all(row["staleness/mixed_frac"] == 0.0 for row in rows)
    for row in rows:
        assert row["time/wait_for_rollouts_s"] >= 0 and row["time/wait_for_trainer_s"] >= 0
        assert 0 <= row["rollout/overlap_frac"] <= 1 and 0 <= row["rollout/ahead"] <= 1 + ahead


def test_rollouts_that_two_versions_drew_are_counted(tmp_path, monkeypatch):
    """Weights change while the second batch is under way: its first tokens are older."""

    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 2:
            end = time.perf_counter() + SOON
            while engine.held == 0 and time.perf_counter() < end:
                time.sleep(0.001)

    Run(tmp_path, Scripted(script), 1)(monkeypatch)
    second = lines(tmp_path)[2]
    assert second["staleness/mixed_frac"] == 1.0 and second["staleness/max"] == 1
    assert 0 < second["staleness/mean"] < 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_evaluation_has_the_engine_to_itself_and_the_newest_weights(
    tmp_path, monkeypatch, ahead
):
    def script(call, engine):
        time.sleep(0.005)
        if call == "score":
            assert engine.under_way == 1

    engine = Scripted(script)
    Run(tmp_path, engine, ahead, changes=("eval.every_steps=1",))(monkeypatch)
    assert engine.most_at_once == 1


def failing(call, number, engine_error=True):
    """Fails in the number-th call of its kind, once."""
    seen = {"load": 0, "sample": 0, "score": 0}

    def script(this, engine):
        seen[this] += 1
        if this == call and seen[this] == number:
            raise EngineError("the engine broke.") if engine_error else Bomb()

    return script


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    "call, number, saved",
    [("sample", 4, 3), ("load", 4, 3), ("score", 3, 3)],
    ids=["sampling", "publishing", "evaluating"],
)
def test_where_the_engine_breaks_the_last_whole_step_is_saved_and_nothing_is_done_twice(
    tmp_path, monkeypatch, ahead, call, number, saved
):
    run = Run(tmp_path, Scripted(failing(call, number)), ahead)
    with pytest.raises(EngineError) as error:
        run(monkeypatch)
    at = store.latest(tmp_path / "checkpoints") - 1_000_000
    if ahead and call == "sample":  # seen in the trainer as soon as it looks, so perhaps earlier
        assert 1 <= at <= saved
    else:
        assert at == saved
    said = f"the engine broke. saved rl step {at} in {tmp_path}; the same command resumes."
    assert str(error.value) == said
    again = Run(tmp_path, Scripted(), ahead)
    assert again(monkeypatch) == STEPS
    assert run.trained[:at] + again.trained == stream()
    assert [row["step"] for row in lines(tmp_path)] == list(range(STEPS + 1))


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_engine_that_breaks_before_the_first_step_leaves_a_run_to_begin_again(
    tmp_path, monkeypatch, ahead
):
    with pytest.raises(EngineError, match="broke. no rl step was made in .*begins it"):
        Run(tmp_path, Scripted(failing("sample", 1)), ahead)(monkeypatch)
    again = Run(tmp_path, Scripted(), ahead)
    again(monkeypatch)
    assert again.trained == stream()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("off", [-2, 1])
def test_a_token_of_a_version_that_cannot_be_is_never_trained_on(tmp_path, monkeypatch, ahead, off):
    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 4:
            engine.told = 3 + off

    run = Run(tmp_path, Scripted(script), ahead)
    with pytest.raises(EngineError, match="must be drawn by version.*saved rl step 3"):
        run(monkeypatch)
    assert run.trained == stream(3)


def test_in_turn_an_older_version_is_an_error_and_not_a_staleness(tmp_path, monkeypatch):
    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 4:
            engine.told = 2

    with pytest.raises(
        EngineError, match="must be drawn by version 3 of.*token 5 carries version 2"
    ):
        Run(tmp_path, Scripted(script))(monkeypatch)


def test_a_mistake_in_the_thread_is_the_users_as_it_is_in_turn(tmp_path, monkeypatch):
    changes = ("data.max_prompt_tokens=3",)
    with pytest.raises(train.ConfigError, match="Try --set data.max_prompt_tokens"):
        Run(tmp_path, Scripted(), 1, changes=changes)(monkeypatch)


@pytest.mark.parametrize("ahead, dies_at", [(1, 4), (2, 2), (3, 5)])
def test_no_prompt_is_lost_or_doubled_by_a_run_that_dies(tmp_path, monkeypatch, ahead, dies_at):
    """It dies with batches ready and under way, and saves nothing on the way out."""
    changes = ("save.every_steps=2",)
    run = Run(tmp_path, Scripted(), ahead, changes=changes)
    write = MetricsLog.write

    def dies(log, stage, step, metrics, **named):
        if step == dies_at:
            raise Bomb
        write(log, stage, step, metrics, **named)

    with monkeypatch.context() as patch, pytest.raises(Bomb):
        patch.setattr(MetricsLog, "write", dies)
        run(monkeypatch)
    saved = 2 * ((dies_at - 1) // 2)
    again = Run(tmp_path, Scripted(), ahead, changes=changes)
    assert again(monkeypatch) == STEPS
    assert run.trained == stream(dies_at) and len(run.engine.sampled) >= dies_at
    assert again.trained == stream()[saved:]
    assert [row["step"] for row in lines(tmp_path)] == list(range(STEPS + 1))


def test_groups_drawn_anew_are_where_the_stream_goes_on(tmp_path, monkeypatch):
    """Every group's rewards are equal here, so each step makes all its draws."""
    changes = ("rollout.max_draws=2", "save.every_steps=2")
    whole = Run(tmp_path / "whole", Scripted(), 2, changes=changes)
    whole(monkeypatch)
    assert [ids for ids, _ in whole.engine.sampled] == stream(2 * STEPS)
    parts = Run(tmp_path / "parts", Scripted(), 2, changes=(*changes, "steps=4"))
    rest = Run(tmp_path / "parts", Scripted(), 2, changes=changes)
    parts(monkeypatch)
    rest(monkeypatch)
    assert parts.trained + rest.trained == whole.trained


def test_a_stop_while_the_trainer_waits_saves_at_once_and_ends_the_sampling(tmp_path, monkeypatch):
    stop = StopRequest()

    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 3:
            threading.Timer(0.05, lambda: setattr(stop, "signal", 15)).start()
            assert engine.closed.wait(SOON)
            raise EngineError("closed")

    run = Run(tmp_path, Scripted(script), 1, stop)
    start = time.perf_counter()
    with pytest.raises(Stopped, match="SIGTERM: saved rl step 2 in .*; the same command resumes"):
        run(monkeypatch)
    assert time.perf_counter() - start < SOON / 2
    again = Run(tmp_path, Scripted(), 1)
    again(monkeypatch)
    assert run.trained + again.trained == stream()


def test_a_stop_before_the_first_batch_has_nothing_to_save(tmp_path, monkeypatch):
    stop = StopRequest()

    def script(call, engine):
        if call == "sample":
            stop.signal = 2
            assert engine.closed.wait(SOON)
            raise EngineError("closed")

    with pytest.raises(Stopped, match="SIGINT: no rl step was made"):
        Run(tmp_path, Scripted(script), 1, stop)(monkeypatch)
    Run(tmp_path, Scripted(), 1)(monkeypatch)
    assert [row["step"] for row in lines(tmp_path)] == list(range(STEPS + 1))
