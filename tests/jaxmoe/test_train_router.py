# SPDX-License-Identifier: Apache-2.0
"""A router and a loss term of one's own, by the config: from the command to metrics and weights."""

import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import lines

from jaxmoe import doctor, eval, export, train
from jaxmoe.checkpoint.hf import load_params
from jaxmoe.checkpoint.run import initial_params
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.model import make_ops
from jaxmoe.model.moe.router import RouterContext
from jaxmoe.rl.from_config import algorithm_from_config
from tests.jaxmoe.commands import TINIEST, arguments, train_here

CODE = '''
import jax
import jax.numpy as jnp
from jaxmoe.model.moe.router import router_logits


def scheduled(h_BTD, layer, *, active, context, indices_BTA=None, product=None, scale=1.0):
    """Top-k of logits with a bias that differs between layers and falls with the step."""
    options = {} if product is None else {"product": product}
    logits_BTE = router_logits(h_BTD, layer, **options)
    experts_E = jnp.arange(logits_BTE.shape[-1], dtype=jnp.float32)
    phase = 3.0 * (context.layer.astype(jnp.float32) + 1.0)
    bias_E = scale * jnp.sin(phase * experts_E) / (1.0 + context.step.astype(jnp.float32))
    own_BTA = jax.lax.top_k(logits_BTE + bias_E[None, None], active)[1]
    if indices_BTA is None:
        indices_BTA = own_BTA
    indices_BTA = jnp.where(indices_BTA < 0, own_BTA, indices_BTA)
    top_BTA = jnp.take_along_axis(logits_BTE, indices_BTA, axis=-1)
    return indices_BTA, jax.nn.softmax(top_BTA, axis=-1)


def ignores(h_BTD, layer, *, active, indices_BTA=None):
    top_BTA, indices_BTA = jax.lax.top_k(router_logits(h_BTD, layer), active)
    return indices_BTA, jax.nn.softmax(top_BTA, axis=-1)


def by_place(h_BTD, layer, *, active):
    logits_BTE = router_logits(h_BTD, layer)
    noise_BTE = jax.random.normal(jax.random.key(0), logits_BTE.shape)
    top_BTA, indices_BTA = jax.lax.top_k(logits_BTE + noise_BTE, active)
    return indices_BTA, jax.nn.softmax(top_BTA, axis=-1)


def shadow(indices_BTA):
    return {"experts_BTA": indices_BTA}


def defaulted(logp_BT, ref_logp_BT=None):
    return logp_BT


def z_loss(router_logits_BTLE, token_mask_BT, n_tokens, load_LE):
    lse_BTL = jax.nn.logsumexp(router_logits_BTLE, axis=-1)
    lse_BTL = lse_BTL + 0.0 * jnp.sum(router_logits_BTLE * load_LE[None, None], axis=-1)
    tokens_BTL = jnp.where(token_mask_BT[:, :, None], lse_BTL**2, 0.0)
    return jnp.sum(tokens_BTL) / (n_tokens * load_LE.shape[0])
'''
ROUTER = ("router.route=my_router:scheduled(scale=2.0)",)
Z_LOSS = ("router.record=record_router_logits", "loss.terms=my_router:z_loss(weight=0.01)")


@pytest.fixture(autouse=True)
def my_router(tmp_path, monkeypatch):
    (tmp_path / "my_router.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_router", None)
    yield
    sys.modules.pop("my_router", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("rollout.compare_experts=True", "optim.microbatches=2"),
        ("model.numerics=invariant", "rollout.sequences_per_step=16"),
        ("router.replay=R3", "optim.tokens_per_microbatch=128"),
    ],
    ids=["microbatches", "invariant", "replayed and packed"],
)
def test_custom_routers_and_terms_train_and_engines_agree(tmp_path, options):
    changes = (*ROUTER, *Z_LOSS, *options)
    words = arguments(tmp_path / "run", *TINIEST, *changes)
    assert train_here(words) == 0
    with jax.numpy_dtype_promotion("standard"):  # the loss multiplies by counts
        assert eval.main(words) == 0
    rows = [row for row in lines(tmp_path / "run") if row.get("grad/norm") is not None]
    assert len(rows) >= 3
    for row in rows[-3:]:
        assert row["train_rollout_logprob_abs_diff"] < 1e-5
        assert row["loss/z_loss"] > 0.1
        assert row.get("router/expert_switches", 0.0) == 0.0


def test_step_and_layer_change_where_tokens_go():
    cfg = override(load_config("tiny.py"), *TINIEST, *ROUTER)
    router = make_ops(cfg).router
    m = cfg.model
    h_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50, m.d_model)), jnp.float32)
    layer = {
        "w_router": jnp.asarray(
            np.random.default_rng(1).normal(size=(m.d_model, m.n_experts)) / m.d_model**0.5,
            jnp.float32,
        ),
        "b_router": jnp.zeros(m.n_experts),
    }
    chosen = {
        (number, step): router(
            h_BTD,
            layer,
            active=m.experts_per_token,
            context=RouterContext(jnp.int32(number), jnp.int32(step)),
        )[0]
        for number in (0, 1)
        for step in (0, 5)
    }
    assert not np.array_equal(chosen[0, 0], chosen[1, 0])
    assert not np.array_equal(chosen[0, 0], chosen[0, 5])


REFUSED = [
    (("router.route=my_router:zzz",), "must be a function that can be imported"),
    (("router.route=top_k",), "router.route: there is no function 'top_k'. Did you mean"),
    (("router.route=my_router:scheduled(skale=1.0)",), "has no option 'skale'. Did you mean"),
    (("router.route=route_top_k(active=1)",), "route_top_k has no option 'active'"),
    (("router.route=my_router:ignores", "router.replay=R3"), "return those experts"),
    (("router.route=my_router:by_place",), "must choose a token's experts by that token alone"),
    (("router.record=my_router:shadow",), "with names of their own; shadow returns ['experts_BTA"),
    (("loss.terms=my_router:defaulted",), "defaulted must take ref_logp_BT without a default"),
    ((ROUTER[0], "rollout.engine=vllm"), "needs rollout.engine=native, got rollout.engine=vllm"),
    (("loss.terms=my_router:z_loss(weight=0.01)",), "z_loss takes router_logits_BTLE"),
    (Z_LOSS, "values_BT. Try --set rollout.compare_experts=True."),
    ((Z_LOSS[1].replace("0.01", "'a'"),), "the weight of my_router:z_loss must be a finite"),
    (("router.record=my_router:z_loss",), "router.record: z_loss takes router_logits_BTLE"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        cfg = override(load_config("tiny.py"), *TINIEST, *changes)
        make_ops(cfg)
        algorithm_from_config(cfg)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_doctor_checks_only_gpt_osss_router(tmp_path, capsys):
    assert doctor.main(arguments(tmp_path / "run", *TINIEST, *ROUTER)) == 2
    assert "router.route is my_router:scheduled" in capsys.readouterr().err


def bias_loss(router_logits_BTLE, token_mask_BT, n_tokens, bias_LE):
    probs_BTLE = jax.nn.softmax(router_logits_BTLE, axis=-1)
    masked_BTLE = jnp.where(token_mask_BT[:, :, None, None], probs_BTLE, 0.0)
    return jnp.sum(masked_BTLE * bias_LE[None, None]) / n_tokens


@pytest.mark.slow
def test_a_custom_array_reaches_a_term_as_documented(tmp_path):
    example = Path(__file__).parents[2] / "docs/examples/own_array.py"
    train_with_bias = runpy.run_path(str(example))["train_with_bias"]
    m = load_config("tiny.py").model
    settings = (*TINIEST, "steps=1", f"workdir={tmp_path / 'run'}")
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        train_with_bias(bias_loss, np.ones((m.n_layers, m.n_experts)), *settings)
    rows = [row for row in lines(tmp_path / "run") if "loss/bias" in row]
    # probabilities sum to 1 in each layer
    assert [row["loss/bias"] for row in rows] == [pytest.approx(m.n_layers, rel=1e-4)]


REMEDIES = {
    "straight-through": (
        "router.route=route_straight_through",
        "rollout.compare_experts=True",
        "lora.attention_rank=2",
        "lora.expert_rank=2",
        "model.d_model=64",
        "model.d_expert=64",
    ),
    "annealed": ("router.route=route_annealed(steps=2)", "optim.microbatches=2"),
    "soft": ("router.route=route_softly", "optim.tokens_per_microbatch=128", "router.lr_scale=0.1"),
    "noise and terms": (
        "router.noise=normal(0.5)",
        "router.replay=R3",
        "router.terms=load_balance(0.01) + z_loss(1e-3) + router_entropy(1e-3)",
    ),
    "invariant straight-through": (
        "router.route=route_straight_through",
        "model.numerics=invariant",
        "optim.microbatches=2",
    ),
    "invariant annealed": ("router.route=route_annealed(steps=2)", "model.numerics=invariant"),
    "invariant noise": ("router.noise=gumbel(0.5)", "router.replay=R3", "model.numerics=invariant"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedys_engine_samples_the_trainers_policy(tmp_path, name):
    # The entropy bonus gives a gradient where all rewards are equal.
    changes = ("loss.entropy_coef=0.1", "optim.lr=1e-3", *REMEDIES[name])
    assert train_here(arguments(tmp_path / "run", *TINIEST, *changes)) == 0
    rows = [row for row in lines(tmp_path / "run") if "policy/ratio_mean" in row]
    assert len(rows) == 3 and min(row["grad/norm"] for row in rows) > 0.0
    largest = max(row["train_rollout_logprob_abs_diff_max"] for row in rows)
    assert largest == 0.0 if "invariant" in name else largest < 2e-5
    for row in rows:
        assert row.get("router/expert_switches", 0.0) == 0.0
        if "terms" in name:
            assert 1.0 <= row["loss/load_balance"] < 8.0
            assert row["loss/z_loss"] > 0.0 > row["loss/router_entropy"]


@pytest.mark.slow
def test_a_frozen_router_cannot_be_trained_by_resuming(tmp_path, capsys):
    work, changes = tmp_path / "run", ("router.freeze=True", "save.export_dtype=float32", "steps=2")
    changes = (*changes, "loss.entropy_coef=0.1")
    words = arguments(work, *TINIEST, *changes)
    assert train_here(words) == 0
    assert export.main([*words, "--out", str(tmp_path / "out")]) == 0
    cfg = override(load_config("tiny.py"), *TINIEST, *changes, f"workdir={work}")
    start, end = initial_params(cfg, None), load_params(tmp_path / "out", cfg.model)
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/"): bool(np.any(x != y))
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(start), jax.tree.leaves(end), strict=True
        )
    }
    assert {path for path, is_changed in changed.items() if not is_changed} >= {
        f"layers/{kind}/{name}" for kind in ("sliding", "full") for name in ("w_router", "b_router")
    }
    assert changed["layers/full/w_down"]
    capsys.readouterr()
    assert train.main([*words, "--set", "steps=3", "--set", "router.freeze=False"]) == 2
    assert "holds a run with router.freeze=True; it cannot continue" in capsys.readouterr().err
