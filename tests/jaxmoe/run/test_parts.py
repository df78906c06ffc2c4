# SPDX-License-Identifier: Apache-2.0
"""A run is made of parts: another one is passed, and no module is patched."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import NUMBERS, Scripted

from jaxmoe.collection.batches import make_batch
from jaxmoe.config_file import load_config, override
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.rl.update import TokenStats
from jaxmoe.run.parts import make_parts
from jaxmoe.run.programs import JitProgram
from jaxmoe.train import train

SMALL = (
    "model.d_model=32",
    "model.d_expert=24",
    "model.n_experts=4",
    "data.train_rows=64",
    "data.held_out_rows=4",
    "warmup.steps=0",
    "rollout.sequences_per_step=8",
    "rollout.samples_per_prompt=2",
    "rollout.max_gen_batches=1",
    "steps=2",
    "eval.every_steps=2",
)


class Random(Scripted):
    """Random tokens; it accepts any weights."""

    def load(self, params, version):
        self.version = version


def fixed_step(*_):
    """A step that changes no weight."""

    def step(state, batch, minibatches, base):
        numbers = {name: jnp.zeros(()) for name in NUMBERS} | {"grad/norm": jnp.ones(())}
        return state, numbers, TokenStats(batch.rollout_logp_BT, batch.rollout_logp_BT)

    return JitProgram(step, {})


def test_a_run_uses_its_parts(tmp_path):
    cfg = override(load_config("tiny.py"), *SMALL, f"workdir={tmp_path}")
    recorded = SimpleNamespace(engine=Random(), rewards=[], plots=0)

    def make_seen_batch(cfg, task, rollouts, rewards):
        recorded.rewards.append(len(rewards))
        return make_batch(cfg, task, rollouts, np.arange(8.0))

    def plot_nothing(*_, **__):
        recorded.plots += 1

    train(
        cfg,
        replace(
            make_parts(cfg),
            open_engine=lambda *_: recorded.engine,
            rl_program=fixed_step,
            make_batch=make_seen_batch,
            plot_run=plot_nothing,
        ),
    )
    assert recorded.rewards == [8, 8] and recorded.plots == 1 and recorded.engine.closed.is_set()
    assert len(recorded.engine.sampled) == 2
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["stage"] == "rl"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("setting, frac", [("auto", 4 * 65 / (8 * 58)), ("off", 1.0)])
def test_a_run_shares_prompts_as_its_config_says(tmp_path, setting, frac):
    """A group of two has 51 + 2 * 7 tokens; rows of its samples have 58 each."""
    share = f"optim.share_prompts={setting}"
    cfg = override(load_config("tiny.py"), *SMALL, share, f"workdir={tmp_path}")
    shared = []

    def seen_step(*_):
        step = fixed_step()

        def record_sharing(state, batch, minibatches, base):
            shared.append(batch.packing is not None and batch.packing.shared is not None)
            return step.fn(state, batch, minibatches, base)

        return JitProgram(record_sharing, {})

    train(
        cfg,
        replace(
            make_parts(cfg),
            open_engine=lambda *_: Random(),
            rl_program=seen_step,
            plot_run=lambda *_, **__: None,
        ),
    )
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "gate/closed" in row]
    assert [row["batch/computed_tokens_frac"] for row in rows] == [pytest.approx(frac)] * 2
    assert shared == [setting == "auto"]  # traced once
