# SPDX-License-Identifier: Apache-2.0
"""A run that broke its numbers ends, and says what to type."""

import math

import jax.numpy as jnp
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.run import guards
from jaxmoe.run.guards import check_finite

CFG = override(load_config("tiny_mxfp4.py"), "model.n_layers=4")
PLAIN = load_config("tiny.py")


def test_an_expert_that_the_step_broke_is_named():
    rounded = {"layers": {"sliding": {"w_down": jnp.ones((2, 2, 64, 3)).at[0, 1].set(math.inf)}}}
    with pytest.raises(ConfigError, match="loss must be finite; the step broke layer 0, w_down, e"):
        check_finite({"loss": math.nan}, 3, rate=("optim.lr", 1e-4), cfg=CFG, policy=rounded)


def test_a_broken_expert_is_named_without_a_metric():
    rounded = {"layers": {"full": {"w_gate_up": jnp.ones((2, 4, 64, 3)).at[1, 2].set(math.nan)}}}
    pattern = "step 3: experts must be finite; the step broke layer 3, w_gate_up, expert 2 .* warm"
    with pytest.raises(ConfigError, match=pattern):
        check_finite({"loss": 1.0}, 3, rate=("warmup.lr", 1e-4), cfg=CFG, policy=rounded)


def test_experts_are_read_once_with_their_metric(monkeypatch):
    monkeypatch.setattr(guards, "find_not_finite", lambda *_: pytest.fail("read twice"))
    metrics = {"loss": 1.0, "quant/relative_error": 0.1}
    check_finite(metrics, 3, rate=("optim.lr", 1e-4), cfg=CFG, policy={"layers": {}})


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_numbers_end_runs_with_a_learning_rate(broken):
    options = {"rate": ("optim.lr", 1e-4), "cfg": PLAIN, "policy": {"layers": {}}}
    check_finite({"loss": 1.0}, 3, **options)
    pattern = "step 3: grad/norm, loss must be finite. Try --set optim.lr=1e-05, or a smaller"
    with pytest.raises(ConfigError, match=pattern):
        check_finite({"grad/norm": broken, "loss": broken, "x": 0.0}, 3, **options)
