# SPDX-License-Identifier: Apache-2.0
"""rollout.schedule=groups in the loop: each prompt is trained once, whatever breaks."""

import re
import signal
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import CFG, PROMPTS, SOON, STEPS, Run, Scripted, counting_step, lines, stream

from jaxmoe.cli import Stopped, StopRequest
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.config_file import override
from tests.jaxmoe import commands

GROUPS = ("rollout.schedule=groups",)


def flat(batches):
    return [prompt for batch in batches for prompt in batch]


def test_prompts_are_trained_once_in_order(tmp_path):
    run = Run(tmp_path, Scripted(), 2, changes=GROUPS)
    assert run() == STEPS and run.trained == stream()
    assert sorted(run.engine.sampled) == sorted(set(run.engine.sampled))
    rows = lines(tmp_path)[1:]
    for k, row in enumerate(rows):
        first = k * PROMPTS
        assert (row["rollout/oldest_group"], row["rollout/newest_group"]) == (first, first + 2)
        assert row["rollout/group_lag_max"] == 0 and row["staleness/max"] <= 2
        assert 0 <= row["rollout/engine_idle_frac"] <= 1 >= row["rollout/trainer_idle_frac"] >= 0


def wait_until(holds):
    end = time.perf_counter() + SOON
    while not holds() and time.perf_counter() < end:
        time.sleep(0.001)


def test_a_late_group_is_overtaken_and_trained(tmp_path):
    first = threading.Lock()

    def script(call, engine):
        if call == "sample" and first.acquire(blocking=False):
            wait_until(lambda: engine.version == 1)

    run = Run(tmp_path, Scripted(script), 2, changes=(*GROUPS, "rollout.max_lag=1"))
    assert run() == STEPS
    assert sorted(flat(run.trained)) == sorted(flat(stream()))
    assert max(row["rollout/group_lag_max"] for row in lines(tmp_path)[1:]) == 1


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_stopped_run_continues_with_its_queue(tmp_path, capsys, max_lag):
    stop, engine = StopRequest(), Scripted()

    def script(call, engine):
        if call == "load" and engine.version == 1:  # version 2 follows
            wait_until(lambda: engine.answered >= 4 * PROMPTS - 1)
            stop.signal = signal.SIGTERM

    changes = (*GROUPS, f"rollout.max_lag={max_lag}")
    engine.script = script
    before = Run(tmp_path, engine, 2 + max_lag, stop=stop, changes=changes)
    with pytest.raises(Stopped):
        before()
    after = Run(tmp_path, Scripted(), 2 + max_lag, changes=changes)
    assert after() == STEPS
    trained = flat([*before.trained[:2], *after.trained])
    assert sorted(trained) == sorted(flat(stream())) and (max_lag or trained == flat(stream()))
    kept = len(flat(stream())) - 2 * PROMPTS - len(after.engine.sampled)
    assert 0 < kept and f"groups   {kept} of the queue are kept" in capsys.readouterr().out


def test_a_wrong_version_is_sampled_anew(tmp_path):
    """The run stops at the group; after the fix it does not stop at what the queue has of it."""

    def script(call, engine):
        if call == "load" and engine.version == 1:  # version 2 follows
            engine.claimed_version = 99

    liar = Run(tmp_path, Scripted(script), 2, changes=GROUPS)
    with pytest.raises(EngineError, match="must be sampled by weight version"):
        liar()
    honest = Run(tmp_path, Scripted(), 2, changes=GROUPS)
    assert honest() == STEPS and [*liar.trained, *honest.trained] == stream()


def test_a_broken_group_ends_the_run_saved(tmp_path):
    calls = iter(range(100))

    def script(call, engine):
        if call == "sample" and next(calls) == 10:
            raise EngineError("the engine broke.")

    broken = Run(tmp_path, Scripted(script), 2, changes=GROUPS)
    with pytest.raises(EngineError, match="the engine broke"):
        broken()
    after = Run(tmp_path, Scripted(), 2, changes=GROUPS)
    assert after() == STEPS
    assert [*broken.trained[: STEPS - len(after.trained)], *after.trained] == stream()


class Faulty(Scripted):
    """Answers after the first step are lost, or have a log-prob that no token can have."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def rollout(self, *args):
        rollout = super().rollout(*args)
        if self.version < 1:
            return rollout
        if self.fault == "lost":
            return replace(rollout, lost="sandbox", env_fault="SandboxError: no space left")
        return replace(rollout, rollout_logp=np.full(len(rollout.tokens), 0.02, np.float32))


@pytest.mark.parametrize("fault", ["lost", "log-prob"])
def test_groups_that_stopped_a_run_are_sampled_anew(tmp_path, fault):
    broken = Run(tmp_path, Faulty(fault), 2, changes=GROUPS)
    with pytest.raises(EngineError, match="may be lost|log-probs from"):
        broken()
    after = Run(tmp_path, Scripted(), 2, changes=GROUPS)
    assert after() == STEPS
    assert [*broken.trained[: STEPS - len(after.trained)], *after.trained] == stream()


def test_a_refused_batch_of_groups_is_sampled_anew(tmp_path, monkeypatch):
    def close_once(state, batch, minibatches, base, **options):
        state, numbers, stats = counting_step(state, batch, minibatches, base, **options)
        closed = jnp.where(state.policy["w"] == 3.0, 1.0, 0.0)
        # A closed gate leaves the weights as they were.
        params = jax.tree.map(lambda w: w - closed, state.params)
        gaps = "train_rollout_logprob_abs_diff_max", "rollout_corr/k3_kl", "rollout_corr/ess"
        numbers |= {"gate/closed": closed} | dict.fromkeys(gaps, closed)
        return replace(state, params=params), numbers, stats

    changes = (*GROUPS, "gate.k3=1.0", "gate.skip=False")
    monkeypatch.setattr("scripted.counting_step", close_once)
    refused = Run(tmp_path, Scripted(), 2, changes=changes)
    with pytest.raises(ConfigError, match="gate.skip"):
        refused()
    monkeypatch.undo()
    after = Run(tmp_path, Scripted(), 2, changes=changes)
    assert after() == STEPS
    assert [*refused.trained[:2], *after.trained] == stream()
    # Those three prompts had been sampled, and are again.
    first = {prompts for prompts, _ in after.engine.sampled}
    assert {(prompt,) for prompt in refused.trained[2]} <= first


def test_dynamic_sampling_draws_further_groups(tmp_path):
    """Every reward is 0, so each step draws as often as it may, and no prompt twice."""
    changes = (*GROUPS, "rollout.max_gen_batches=2")
    run = Run(tmp_path, Scripted(), 1, changes=changes)
    assert run() == STEPS
    assert run.trained == stream(2 * STEPS)[::2]
    rows = lines(tmp_path)[1:]
    assert [row["rollout/gen_batches"] for row in rows] == [2] * STEPS
    first = [2 * PROMPTS * k for k in range(STEPS)]
    assert [row["rollout/oldest_group"] for row in rows] == first
    assert [row["rollout/newest_group"] for row in rows] == [k + 2 * PROMPTS - 1 for k in first]
    assert max(row["staleness/max"] for row in rows) <= 1


@pytest.mark.parametrize(
    "changes, message",
    [
        (["rollout.max_lag=1"], r"rollout.max_lag \(1\) needs rollout.schedule=groups"),
        (GROUPS, r"rollout.max_lag \(0\) must be below rollout.max_staleness \(0\)"),
        (
            [*GROUPS, "rollout.max_staleness=1", "rollout.max_lag=1"],
            "Try --set rollout.max_staleness=2",
        ),
        (
            [*GROUPS, "rollout.max_staleness=1", "mesh.fsdp=2"],
            "rollout.engine=native must sample several groups at once",
        ),
        (
            [
                *GROUPS,
                "rollout.max_staleness=1",
                "rollout.engine=vllm",
                "rollout.vllm.launch=0",
                "model.vocab_multiple=1",
            ],
            "rollout.engine=vllm must sample several groups at once",
        ),
        (["rollout.schedule=rows"], "rollout.schedule"),
        (["rollout.native.on_weight_sync=keep"], "needs rollout.schedule=groups"),
        (
            [
                *GROUPS,
                "rollout.max_staleness=1",
                "rollout.native.on_weight_sync=recompute",
                "mesh.fsdp=2",
            ],
            "rollout.engine=native must sample several groups at once",
        ),
    ],
)
def test_settings_that_cannot_flow_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        override(CFG, *changes)
    assert "\n" not in str(error.value)


CHANGES = dict(
    rollout__schedule="groups",
    rollout__max_staleness=2,
    rollout__max_gen_batches=1,
    loss__rollout_correction="token_is",
    steps=7,
)


def run_killed(work, **changes):
    """What a resumed run prints, killed after the fifth step."""
    process = commands.start(commands.command(work, **CHANGES, **changes))
    commands.wait_for(process, work, "rl", 5)
    process.kill()
    process.communicate()
    code, out, err = commands.finish(commands.command(work, **CHANGES, **changes))
    assert code == 0, err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["keep", "recompute"])
def test_killed_runs_in_flight_train_each_group_once(tmp_path, sync):
    out = run_killed(tmp_path, rollout__native__on_weight_sync=sync)
    assert re.search(r"^groups   [0-6] of the queue are kept", out, re.M)
    rows = commands.lines(tmp_path)[-7:]
    assert [groups_of(row) for row in rows] == [[2 * k, 2 * k + 1] for k in range(7)]
    assert max(row["staleness/max"] for row in rows) <= 2


@pytest.mark.slow
def test_a_killed_run_of_groups_resumes_bitwise(tmp_path):
    """With the native engine, strict order and one draw a step."""
    code, _, err = commands.finish(commands.command(tmp_path / "a", **CHANGES))
    assert code == 0, err
    out = run_killed(tmp_path / "b")
    # Those of older weights are waited for, others may have finished.
    assert re.search(r"^groups   [456] of the queue are kept", out, re.M)
    complete, resumed = (commands.lines(tmp_path / name) for name in "ab")
    assert len(complete) == len(resumed)
    assert [groups_of(row) for row in resumed[-7:]] == [[2 * k, 2 * k + 1] for k in range(7)]
    assert list(map(without_waits, resumed)) == list(map(without_waits, complete))


def groups_of(row):
    return [row["rollout/oldest_group"], row["rollout/newest_group"]]


def without_waits(row):
    waits = ("overlap_frac", "ready_batches", "finished_groups", "engine_idle_frac")
    names = {f"rollout/{name}" for name in (*waits, "trainer_idle_frac")}
    return {name: value for name, value in row.items() if name not in names}
