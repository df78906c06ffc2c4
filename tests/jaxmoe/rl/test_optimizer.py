# SPDX-License-Identifier: Apache-2.0
"""AdamW by hand: the first update is the learning rate, clipping does not change its sign."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG

from jaxmoe.config import Config, ConfigError, OptimConfig
from jaxmoe.config.settings import iter_settings
from jaxmoe.config_file import load_config, override
from jaxmoe.rl.optimizer import (
    make_optimizer,
    policy_learning_rate,
    rl_optimizer,
    weight_decay_mask,
)
from jaxmoe.rl.state import Trained
from tests.jaxmoe.random_weights import random_weights


def updates(cfg, steps, gradient=3.0, count=1, **options):
    tx = make_optimizer(cfg, steps=steps, **options)
    params = {"w": jnp.ones(2, jnp.float32)}
    state, sizes = tx.init(params), []
    for _ in range(count):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            out, state = tx.update({"w": jnp.full(2, gradient, jnp.float32)}, state, params)
        sizes.append(float(out["w"][0]))
        params = optax.apply_updates(params, out)
    return np.array(sizes)


def test_warm_up_is_linear_and_cosine_ends_correctly():
    cfg = OptimConfig(lr=0.01, lr_warmup_steps=2, lr_end_fraction=0.1)
    sizes = updates(cfg, steps=6, count=7)
    cosine = [0.1 + 0.9 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
    np.testing.assert_allclose(sizes, -0.01 * np.array([0.5, 0.75, *cosine]), rtol=1e-5)


def test_lr_argument_replaces_the_config():
    np.testing.assert_allclose(updates(OptimConfig(lr=0.01), 3, lr=0.5), [-0.5], rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    cfg = OptimConfig(lr=0.01, clip_norm=1e-3, eps=1.0)  # eps 1: the update is m / (1 + sqrt v)
    clipped = 1e-3 / np.sqrt(2)
    np.testing.assert_allclose(updates(cfg, 3), [-0.01 * clipped / (1 + clipped)], rtol=1e-5)


@pytest.mark.slow
def test_weight_decay_shrinks_matrices_alone():
    params = random_weights(CFG, 0)
    params = jax.tree.map(lambda x: x + 1.0, params)
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = make_optimizer(OptimConfig(lr=0.5, weight_decay=0.5), steps=9)
    with jax.numpy_dtype_promotion("standard"):
        out, _ = tx.update(zero, tx.init(params), params)
    shrunk = {
        jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-1]
        for path, x in jax.tree_util.tree_leaves_with_path(out)
        if np.asarray(x).any()
    }
    assert shrunk == {"embed", "head", "w_q", "w_k", "w_v", "w_o", "w_gate_up", "w_down"}
    np.testing.assert_allclose(out["head"], -0.25 * np.asarray(params["head"]), rtol=1e-6)


@pytest.mark.parametrize(
    "name, decay", [("a", True), ("b", True), ("w_value", True), ("b_value", False)]
)
def test_decay_applies_to_matrices_of_adapters_and_heads(name, decay):
    assert weight_decay_mask({"layers": {"full": {"w_q": {name: jnp.ones((2, 3))}}}}) == {
        "layers": {"full": {"w_q": {name: decay}}}
    }


def test_the_cosine_ends_correctly_after_critic_pretraining():
    cfg = override(
        load_config("tiny.py"),
        "steps=7",
        "optim.lr=0.01",
        "optim.lr_end_fraction=0.1",
        "optim.lr_warmup_steps=0",
        "loss.advantages=gae",
        "critic.backbone=own",
        "critic.pretrain_steps=3",
    )
    tx = rl_optimizer(cfg)
    params = Trained({"w": jnp.ones(2)}, {"w": jnp.ones(2)})
    grads, state, rates = jax.tree.map(lambda x: 3.0 * x, params), tx.init(params), []
    for _ in range(8):
        with jax.numpy_dtype_promotion("standard"):
            out, state = tx.update(grads, state, params)
        rates.append(-float(out.policy["w"][0]))
    cosine = [0.01 * (0.1 + 0.9 * (1 + np.cos(np.pi * i / 4)) / 2) for i in range(5)]
    np.testing.assert_allclose(rates, [0, 0, 0, *cosine], rtol=1e-4)


def test_the_logged_rate_is_of_the_first_update():
    cfg = override(
        load_config("tiny.py"),
        "optim.lr=0.01",
        "optim.lr_warmup_steps=3",
        "optim.lr_end_fraction=0.1",
        "loss.minibatches=2",
        "steps=4",
    )
    step_sizes = updates(cfg.optim, steps=8, count=8)
    rates = [policy_learning_rate(cfg, made) for made in (0, 2, 4, 6)]
    np.testing.assert_allclose(-step_sizes[::2], rates, rtol=1e-4)
    pretrained = override(
        cfg, "critic.backbone=own", "loss.advantages=gae", "critic.pretrain_steps=2", "steps=6"
    )
    waits = [rates[0], rates[0]]
    assert [policy_learning_rate(pretrained, made) for made in range(0, 12, 2)] == [*waits, *rates]


def test_warm_up_counts_updates_as_its_setting_says():
    meanings = {key: fact.meaning for key, _, fact in iter_settings(Config)}
    meaning = meanings["optim.lr_warmup_steps"]
    assert meaning.startswith("updates ") and "loss.epochs x loss.minibatches a step" in meaning
    assert "updates" in meanings["optim.lr_end_fraction"]
    cfg = override(
        load_config("tiny.py"),
        "optim.lr=1.0",
        "optim.lr_warmup_steps=10",
        "loss.old_logp=recomputed",
        "loss.epochs=2",
        "loss.minibatches=4",
    )
    rates = [policy_learning_rate(cfg, made) for made in (0, 8, 10, 16)]
    np.testing.assert_allclose(rates, [0.1, 0.82, 1.0, 1.0], rtol=1e-6)


def test_without_a_limit_gradients_are_not_clipped():
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 1e5)}
    updates, states = [], []
    for clip_norm in (None, 1e9):
        tx = make_optimizer(OptimConfig(lr=0.1, clip_norm=clip_norm, eps=1.0), steps=2)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            update, state = tx.update(grads, tx.init(params), params)
        updates.append(update["w"])
        states.append(jax.tree.structure(state))
    assert (updates[0] == updates[1]).all() and states[0] == states[1]


def test_the_router_scale_changes_only_router_updates():
    layer = {name: jnp.full((2, 3), 0.7) for name in ("w_router", "b_router", "w_q", "b_q")}
    params = {"layers": {"full": layer}, "head": layer["w_q"]}
    gradients = jax.tree.map(lambda x: 0.3 * x, params)
    results = {}
    for scale in (1.0, 0.25):
        tx = make_optimizer(OptimConfig(lr=0.1, clip_norm=None), steps=3, router_lr_scale=scale)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            results[scale] = tx.update(gradients, tx.init(params), params)
    # Another scale continues from the same checkpoint.
    assert jax.tree.structure(results[1.0][1]) == jax.tree.structure(results[0.25][1])
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(results[1.0][0]),
        jax.tree.leaves(results[0.25][0]),
        strict=True,
    ):
        factor = 0.25 if "router" in str(path) else 1.0
        np.testing.assert_array_equal(x * np.float32(factor), y)


def test_optax_optimizers_are_named_with_options():
    cfg = OptimConfig(lr=0.01, name="optax:sgd(momentum=0.5)", clip_norm=None, lr_warmup_steps=2)
    np.testing.assert_allclose(updates(cfg, 9, count=3), [-0.015, -0.03375, -0.0525], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adam"}, "no function 'adam'. Did you mean adamw?"),
        ({"name": "muon(beta=0.9)"}, "optim.name: muon has no option 'beta'. Known: momentum"),
        ({"name": "optax:global_norm"}, "takes updates, which is not available here"),
        ({"name": "optax:constant_schedule"}, "takes value, which is not available here"),
        ({"name": "tests.jaxmoe.rl.test_optimizer:no_optimizer"}, "must return an optax.Gradient"),
        ({"name": "optax:lion", "weight_decay": 0.1}, "Try --set optim.weight_decay=0.0, and"),
        ({"name": "optax:lion", "moments": "host"}, "Try --set optim.moments=device."),
    ],
)
def test_what_is_no_optimizer_is_refused(fields, message):
    with pytest.raises(ConfigError) as error:
        make_optimizer(OptimConfig(lr=0.1, **fields), steps=1)
    assert message in str(error.value) and "\n" not in str(error.value)


def no_optimizer(learning_rate):
    return learning_rate
