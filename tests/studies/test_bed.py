# SPDX-License-Identifier: Apache-2.0
"""A step of a bed: it shares prompts as its config says, and the step stays the same."""

import jax
import numpy as np
import pytest

from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.model import init_params, make_ops
from jaxmoe.rl.state import init_rl_state
from studies.automaton import Automaton
from studies.bed import make_bed_step, make_rate_optimizer, take_step
from studies.mxfp4_bed import mxfp4_bed_config

TASK = Automaton(n_symbols=3, n_states=3, length=4)  # prompts of 6 tokens and answers of 4
RATE = 1e-3


def bed_step_of(choice):
    sizes = "rollout.sequences_per_step=16", "rollout.samples_per_prompt=4"
    cfg = mxfp4_bed_config(TASK, 3, *sizes, f"optim.share_prompts={choice}")
    return make_bed_step(cfg, TASK, make_ops(cfg), make_ops(cfg))


def test_a_bed_shares_prompts_as_its_config_says():
    for choice, sharing in (
        ("off", None),
        ("on", PromptSharing(5 + 4 * 5, 4)),
        ("auto", PromptSharing(5 + 4 * 5, 4, max_frac=0.75)),
    ):
        assert bed_step_of(choice).sharing == sharing


@pytest.mark.slow
def test_shared_prompts_leave_a_beds_step_unchanged():
    prompts, answers = TASK.sample_prompts(np.random.default_rng(0), 4)
    calls = []
    for choice in ("off", "on"):
        bed_step = bed_step_of(choice)
        cfg = bed_step.cfg
        params = init_params(jax.random.key(0), cfg.model)
        state = init_rl_state(params, cfg, make_rate_optimizer(cfg, RATE))
        policy = jax.tree.map(np.asarray, state.policy)
        state, row = take_step(bed_step, state, policy, prompts, answers, seed=0, step=1, rate=RATE)
        calls.append((jax.device_get(state.policy), row))
    (want, want_row), (actual, row) = calls
    assert row.keys() == want_row.keys() and want_row["grad/norm"] > 0
    for name, x in want_row.items():
        np.testing.assert_allclose(row[name], x, rtol=1e-4, atol=1e-6, err_msg=name)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        # Adam's first update is the sign of a gradient, whatever its size.
        assert np.mean(np.abs(x - y) > 0.01 * RATE) < 0.01
