# SPDX-License-Identifier: Apache-2.0
"""Settings of the router: those that cannot work are refused with what to type instead."""

import re
import shlex

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.model import make_engine_ops
from jaxmoe.model.moe.router import route_top_k
from jaxmoe.model.trainable import count_trained
from jaxmoe.rl.from_config import algorithm_from_config

TINY = load_config("tiny.py")
ALL = f"model.experts_per_token={TINY.model.n_experts}"
UPDATES = ("loss.minibatches=2", "loss.old_logp=recomputed")
REFUSED = [
    (("router.replay=all",), "must be one of empty, R2, R3"),
    (("router.replay=R2",), "needs several updates per batch"),
    (("router.replay=R3", ALL), "all are active"),
    (("router.replay=R2", ALL, *UPDATES), "all are active"),
    (("router.replay=R3", "rollout.compare_experts=True"), "compares the trainer's experts"),
    (("router.route=route_annealed(steps=900)",), "must be hard after at least one step"),
    (("router.route=route_annealed(steps=0)",), "must be hard after at least one step"),
    (("router.route=route_softly", "rollout.engine=vllm"), "needs rollout.engine=native"),
    (("router.terms=z_loss(-1)",), "z_loss must be above 0 and at most 1e6, got '-1'"),
    (("router.terms=z_loss(nan)",), "z_loss must be above 0 and at most 1e6, got 'nan'"),
    (("router.terms=z_loss",), "must be names with a number each"),
    (("router.terms=router_kl(0.1)",), "needs several updates"),
    (("router.noise=normal(0.3)",), "needs router.replay=R3"),
    (("router.noise=normal(0.3)", "router.replay=R3", ALL), "all are active"),
    (("router.noise=normal(1) + gumbel(1)", "router.replay=R3"), "must name one distribution"),
    (
        ("router.noise=normal(1)", "router.replay=R3", "router.route=route_straight_through"),
        "needs router.route=route_top_k",
    ),
    (("router.freeze=True", "router.terms=z_loss(1)"), "nothing of the router to train"),
    (("router.freeze=True", "router.lr_scale=0.1"), "has no effect with router.freeze=True"),
    (("router.lr_scale=0.0",), "router.lr_scale must be above 0"),
    (("router.noise=normal(1e38)", "router.replay=R3"), "at most 1e6, got '1e38'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_impossible_settings_are_refused_with_advice_that_works(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        override(TINY, *changes)
    assert "\n" not in str(error.value)
    advice = str(error.value).partition(" Try --set ")[2].removesuffix(".")
    for alternative in advice.split(", or --set "):
        settings = [word for word in shlex.split(alternative) if word != "--set"]
        # A run with all experts active needs neither noise nor replay.
        if ALL in changes and settings == ["router.noise="]:
            settings.append("router.replay=")
        override(TINY, *changes, *settings)


def test_r3_records_the_engines_experts_unlike_r2():
    assert override(TINY, "router.replay=R3").records_experts
    r2 = override(TINY, "router.replay=R2", *UPDATES)
    assert not r2.records_experts
    assert override(r2, "rollout.compare_experts=True").records_experts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zloss(1)", "there is no 'zloss'. Did you mean z_loss?"),
        ("z_loss(1) + z_loss(2)", "must name z_loss once"),
        ("z_loss(one)", "at most 1e6, got 'one'"),
        ("z_loss(weight=1)", "at most 1e6, got 'weight=1'"),
        ("z_loss(1) load_balance(1)", "must be names with a number each"),
        ("my_module:term(1)", "must be names with a number each"),
    ],
)
def test_terms_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        override(TINY, f"router.terms={text}")


def test_terms_are_read_with_weights_and_records():
    cfg = override(TINY, "router.terms=load_balance(1e-2) + z_loss(.001)+router_entropy(2e-4)")
    expected = {"load_balance": 0.01, "z_loss": 0.001, "router_entropy": 0.0002}
    assert cfg.router.term_weights == expected
    assert cfg.records_experts  # the load is that of the engine's experts
    terms = algorithm_from_config(cfg).terms
    assert {term.name: term.weight for term in terms if term.name} == {
        f"loss/{name}": weight for name, weight in expected.items()
    }
    assert not override(TINY, "router.terms=z_loss(1e-3)").records_experts


@pytest.mark.parametrize(
    ("route", "is_top_k", "computed"),
    [
        ("route_top_k", True, TINY.model.experts_per_token),
        ("route_straight_through", True, TINY.model.n_experts),
        ("route_softly", False, TINY.model.n_experts),
        ("route_annealed(steps=9)", False, TINY.model.n_experts),
        ("my_module:router", False, TINY.model.experts_per_token),
    ],
)
def test_a_straight_through_router_is_top_k_forward(route, is_top_k, computed):
    cfg = override(TINY, f"router.route={route}")
    assert cfg.router.is_top_k == is_top_k
    assert cfg.computed_experts == computed


def test_an_annealed_router_ends_as_top_k():
    router = override(TINY, "router.route=route_annealed(steps=9)").router
    assert [router.is_top_k_after(step) for step in (0, 8, 9, 50)] == [False, False, True, True]
    assert TINY.router.is_top_k_after(0)
    assert not override(TINY, "router.route=route_softly").router.is_top_k_after(50)


def test_a_frozen_router_is_never_trained():
    n_all, total = count_trained(TINY)
    frozen, _ = count_trained(override(TINY, "router.freeze=True"))
    m = TINY.model
    assert n_all == total
    assert n_all - frozen == m.n_layers * m.n_experts * (m.d_model + 1)
    experts = override(TINY, "router.freeze=True", "optim.trainable=.*(router|down).*")
    only_down, _ = count_trained(override(TINY, "optim.trainable=.*down.*"))
    assert count_trained(experts)[0] == only_down


@pytest.mark.parametrize(
    ("replay", "setting"),
    [
        ("R3", "loss.rollout_correction=mask_switched"),
        ("R3", "loss.objective=switch_aware_clip"),
        ("R2", "loss.objective=switch_aware_clip"),
    ],
)
def test_a_function_of_switches_needs_switches(replay, setting):
    cfg = override(TINY, setting, *UPDATES, f"router.replay={replay}")
    with pytest.raises(ConfigError, match="acts where experts switch, and with router.replay"):
        algorithm_from_config(cfg)
    compared = override(cfg, "router.replay=", "rollout.compare_experts=True")
    algorithm_from_config(compared)


@pytest.mark.parametrize("setting", ["router.lr_scale=0.1", "router.terms=z_loss(1e-3)"])
def test_settings_of_an_untrained_router_are_refused(setting):
    lora = override(load_config("tiny_lora.py"), setting)
    down = override(TINY, setting, "optim.trainable=.*down.*")
    for cfg in (lora, down):
        with pytest.raises(ConfigError, match="needs routers that train") as error:
            count_trained(cfg)
        advice = str(error.value).partition(" Try --set ")[2].removesuffix(".")
        for alternative in advice.split(", or --set "):
            count_trained(override(cfg, *shlex.split(alternative)))


def test_the_engine_has_other_ops_for_other_routers():
    assert make_engine_ops(TINY) is None
    assert make_engine_ops(override(TINY, "router.route=route_softly")) is None
    straight = make_engine_ops(override(TINY, "router.route=route_straight_through"))
    assert straight is not None and straight.router is route_top_k
    noisy = make_engine_ops(override(TINY, "router.noise=gumbel(0.5)", "router.replay=R3"))
    assert noisy is not None and noisy.router.keywords["scale"] == 0.5
