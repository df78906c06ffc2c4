# SPDX-License-Identifier: Apache-2.0
"""A run that shares prompts is, one step ahead of its weights, the run that does not."""

import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from scripted import SOON, Scripted

from jaxmoe.config_file import load_config, override
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.run.parts import make_parts
from jaxmoe.train import train

# a clock's numbers, and those of what was computed
OTHERS = "time/", "tokens_per_s", "rollout/overlap", "rollout/ready", "batch/"
STEPS = 3
AHEAD = (
    "model.d_model=32",
    "model.d_expert=24",
    "data.train_rows=64",
    "data.held_out_rows=4",
    f"data.rewards={__name__}:share_early_letters",
    "data.reward_timeout_s=0",
    "warmup.steps=0",
    "rollout.sequences_per_step=8",
    "rollout.samples_per_prompt=2",
    "rollout.max_gen_batches=1",
    "rollout.max_staleness=1",
    "loss.rollout_correction=token_is(high=2.0)",
    f"steps={STEPS}",
    f"eval.every_steps={STEPS}",
)


def share_early_letters(prompt, response, row):
    """A reward that differs between random answers."""
    return sum("a" <= letter <= "m" for letter in response) / 6


class Ahead(Scripted):
    """Random answers, whatever the weights; it is always one batch ahead of them."""

    def load(self, params, version):
        begun = min(STEPS, version + 1) if version else 0
        end = time.perf_counter() + SOON
        while self.answered < begun and time.perf_counter() < end:
            time.sleep(0.001)
        self.version = version

    def rollout(self, prompt, seed, i, sampling, first):
        drawn = super().rollout(prompt, seed, i, sampling, first)
        logp = np.random.default_rng((seed, i)).uniform(-7, -5, len(drawn.tokens))
        return replace(drawn, rollout_logp=logp.astype(np.float32))


def run_ahead(work, choice):
    """The lines of the steps of a run that is ahead of its weights."""
    settings = f"optim.share_prompts={choice}", f"workdir={work}"
    cfg = override(load_config("tiny.py"), *AHEAD, *settings)
    parts = replace(make_parts(cfg), open_engine=lambda *_: Ahead(), plot_run=lambda *_, **__: None)
    with jax.numpy_dtype_promotion("standard"):
        train(cfg, parts)
    return [row for row in read_metrics(work / "metrics.jsonl") if "grad/norm" in row]


@pytest.mark.slow  # two runs
def test_steps_ahead_of_the_weights_share_prompts(tmp_path):
    shared, unshared = (run_ahead(tmp_path / choice, choice) for choice in ("on", "off"))
    assert [row["staleness/max"] for row in shared] == [0, 1, 1]
    for row, expected in zip(shared, unshared, strict=True):
        assert row["batch/computed_tokens_frac"] < 0.75 and expected["grad/norm"] > 0
        assert expected["batch/computed_tokens_frac"] == 1.0
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, int | float) and not name.startswith(OTHERS):
                assert abs(row[name] - value) <= 2e-5 * max(1.0, abs(value)), name
