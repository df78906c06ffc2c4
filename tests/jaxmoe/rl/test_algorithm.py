# SPDX-License-Identifier: Apache-2.0
"""Algorithms from configs: what they become, and every combination that is refused."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_configs import CORR, config, refusal

from jaxmoe import losses
from jaxmoe.batches.batch import Batch
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.loss import compute_correction, sum_terms
from jaxmoe.rl.terms import entropy_term, value_term
from jaxmoe.rl.validate import check_algorithm

EPS = float(np.finfo(np.float32).eps)


# --- what a config becomes


def test_the_default_config_is_the_default_algorithm():
    assert algorithm_from_config(config()) == Algorithm()


def test_a_config_s_fields_reach_the_algorithm():
    algorithm = algorithm_from_config(
        config(
            samples=4,
            critic="own",
            objective="gspo(clip_high=4e-4)",
            advantages="gae(trace=0.9)",
            aggregation="seq_mean_token_mean",
            kl="kl_k2",
            kl_coef=0.25,
            kl_in="reward",
            entropy_coef=0.125,
            old_logp="recomputed",
            epochs=2,
            minibatches=4,
            rollout_correction="veto + token_is(high=3.0)",
        )
    )
    assert algorithm.objective.func is losses.gspo
    assert algorithm.objective.keywords == {"clip_high": 4e-4}
    assert (
        algorithm.advantages.func is losses.gae
        and algorithm.aggregation is losses.seq_mean_token_mean
    )
    assert algorithm.rollout_correction[0] is losses.veto and algorithm.rollout_correction[
        1
    ].keywords == {"high": 3.0}
    entropy, kl, value = algorithm.terms
    assert entropy == entropy_term(0.125) and value.fn.keywords == value_term().fn.keywords
    assert (kl.name, kl.weight, kl.fn.keywords["kl"]) == ("policy/kl_ref", 0.0, losses.kl_k2)
    assert algorithm.reward_kl.weight == 0.25 and algorithm.reward_kl.fn is kl.fn
    assert (algorithm.critic, algorithm.updates) == ("own", 8)
    assert algorithm.old_logp == "recomputed"


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({}, False),
        ({"kl_coef": 0.1}, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, True),
        ({"kl_in": "reward"}, False),
        ({"old_logp": "rollout"}, False),
        ({"old_logp": "recomputed"}, True),
    ],
)
def test_the_batch_is_scored_first_if_needed(fields, scores):
    assert algorithm_from_config(config(**fields)).needs_scoring == scores


# --- what is refused, and what is not

REFUSED = [
    (
        {"advantages": "gae"},
        "gae takes values_BT, and there is no critic. Try --set critic.backbone=own.",
    ),
    (
        {"critic": "own"},
        "critic.backbone=own needs advantages that take values_BT; "
        "group_advantages does not. Try --set loss.advantages=gae, or --set critic.backbone=none.",
    ),
    ({"critic": "shared", "advantages": "rloo_advantages"}, "rloo_advantages does not."),
    ({"epochs": 2}, "loss.old_logp=detached needs one update per batch, got 2 epochs of 1 "),
    (
        {"minibatches": 4},
        "got 1 epochs of 4 minibatches: after the first update the batch is "
        "off-policy and its ratio is not 1. Try --set loss.old_logp=recomputed.",
    ),
    (
        {"samples": 1},
        "group_advantages compares the samples of a prompt, and "
        "rollout.samples_per_prompt is 1. Try --set rollout.samples_per_prompt=8.",
    ),
    ({"samples": 1, "advantages": "rloo_advantages"}, "rloo_advantages compares the samples"),
    ({"samples": 1, "advantages": "reinforce_pp_baseline_advantages"}, "compares the samples"),
    (
        {"old_logp": "rollout", CORR: "token_is"},
        "loss.old_logp=rollout and importance "
        "weights in loss.rollout_correction correct the same mismatch twice. Try --set "
        "loss.old_logp=recomputed, or a rejection alone.",
    ),
    ({"old_logp": "rollout", CORR: "veto + sequence_icepop"}, "the same mismatch twice"),
    (
        {CORR: "token_is + sequence_is"},
        "loss.rollout_correction: sequence_is would weight tokens "
        "that already have weights, and correct twice. Leave one out.",
    ),
    ({CORR: "token_is + veto + token_icepop"}, "token_icepop would weight tokens"),
    (
        {CORR: "normalize", "old_logp": "recomputed"},
        "normalize takes weights_BT, and "
        'no correction before it sets them. Try --set "loss.rollout_correction=token_is(high=2.0) '
        '+ normalize".',
    ),
    (
        {CORR: "token_is + normalize"},
        "normalize takes batch_mask_BT, which is known before "
        "the gradient only if the batch is scored first. Try --set "
        "loss.old_logp=recomputed.",
    ),
    (
        {"aggregation": "kept_token_mean", "advantages": "gae", "critic": "own"},
        "value_loss returns a scalar, and loss.aggregation rescales the complete loss",
    ),
    (
        {CORR: "token_mean"},
        "loss.rollout_correction: token_mean must return a Correction, as token_is does.",
    ),
    (
        {CORR: "rejection(statistic='token_k4', high=2.0)"},
        "statistic must be one of token_k1, token_k2",
    ),
    ({CORR: "token_icepop(low=2.0, high=0.5)"}, "loss: low must be 0 <= low <= high, which is 0.5"),
    ({CORR: "token_is(high=-1.0)"}, "loss: high must be above 0, got -1.0. Try high=1.0."),
    ({"objective": "ppo_clip(dual_clip=0.5)"}, "dual_clip must be above 1, got 0.5."),
    ({"objective": "sapo(tau_positive=0.0)"}, "tau_positive must be above 0, got 0.0."),
    ({"advantages": "group_advantages(eps=-1.0)"}, "eps must be above 0, got -1.0."),
    (
        {"kl": "kl_k1", "kl_coef": 0.1},
        "loss.kl=kl_k1 has an expected gradient of 0, so it does "
        "not act in the loss. Try --set loss.kl=kl_k3_with_k2_gradient, "
        "or --set loss.kl_in=reward.",
    ),
    (
        {"objective": "reinforce", "epochs": 2},
        "reinforce has no ratio, and there are "
        "2 epochs of 1 minibatches: after the first update nothing corrects for tokens of an "
        "older policy. Try --set loss.objective=ppo_clip",
    ),
    (
        {"objective": "reinforce", "minibatches": 2, "old_logp": "recomputed", CORR: "token_is"},
        "reinforce has no ratio",
    ),
    ({"objective": "grpo_loss"}, "loss: grpo_loss must return [B, T]"),
    ({"objective": "cross_entropy"}, "loss: cross_entropy must return [B, T]"),
    ({"objective": "ppo_clip(clip_low='a')"}, "loss: "),
    ({"objective": "gae"}, "loss.objective: gae takes rewards_BT"),
    ({"advantages": "ppo_clip"}, "loss.advantages: ppo_clip takes logp_BT"),
    ({"aggregation": "rloo_advantages"}, "loss.aggregation: rloo_advantages takes rewards_PR"),
    ({"kl": "ppo_clip"}, "loss.kl: ppo_clip takes advantages_BT"),
    ({CORR: "whiten"}, "loss.rollout_correction: whiten takes x_BT"),
    (
        {"preset": "decoupled_tokn_is"},
        "loss.preset: there is no preset 'decoupled_tokn_is'. Did you mean decoupled_token_is?",
    ),
    ({"preset": "zzz"}, "there is no preset 'zzz'. Known: disabled, decoupled_token_is"),
]


@pytest.mark.parametrize(("fields", "answer"), REFUSED)
def test_impossible_algorithms_are_refused_with_advice(fields, answer):
    assert answer in refusal(**fields)


ALLOWED = [
    {"advantages": "gae", "critic": "own"},
    {"advantages": "gae", "critic": "shared"},
    {"epochs": 2, "old_logp": "recomputed"},
    {"minibatches": 4, "old_logp": "rollout"},
    {"epochs": 2, "objective": "reinforce", CORR: "token_is"},  # of each update's policy
    {"kl": "kl_k1", "kl_coef": 0.1, "kl_in": "reward"},
    {"samples": 1, "advantages": "reinforce_pp_advantages"},
    {"samples": 1, "advantages": "gae", "critic": "own"},
    {"old_logp": "rollout", CORR: "rejection(statistic='seq_mean_k3', high=0.01) + veto"},
    {CORR: "veto + token_is + drift_mask(max_drift=0.1)"},
    {CORR: "token_is + normalize", "old_logp": "recomputed"},
    {"aggregation": "kept_token_mean", "old_logp": "recomputed"},
    {"aggregation": "kept_token_mean"},
    {"kl": "kl_k3_importance", "kl_coef": 0.1},
    {"aggregation": "seq_mean_token_sum_norm(length=9)"},
]


@pytest.mark.parametrize("fields", ALLOWED)
def test_what_each_refusal_tells_to_do_is_accepted(fields):
    algorithm_from_config(config(**fields))


def test_a_mean_without_weight_per_token_is_refused():
    with pytest.raises(ConfigError, match=r"loss: count must return \[B, T\]"):

        def count(mask_BT):
            return jnp.sum(mask_BT.astype(jnp.float32))

        check_algorithm(Algorithm(aggregation=count), 2)


def broken_dict(rewards_PR):
    return rewards_PR - {"mean": 0.0}["group_mean"]


def broken_list(rewards_PR):
    return rewards_PR - [0.0][len(rewards_PR)]


def other_array(rewards_PR, group_PR):
    return rewards_PR - group_PR


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (broken_dict, r"KeyError: 'group_mean' \(.*test_algorithm\.py:\d+, in broken_dict\)"),
        (broken_list, r"IndexError: .*, in broken_list\)\. Correct the function"),
        (other_array, "other_array takes group_PR, .*may take .*, rewards_PR, "),
    ],
)
def test_a_functions_error_is_raised_unchanged(advantages, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_algorithm(Algorithm(advantages=advantages), 2)
    assert "recomputed" not in str(error.value) and "\n" not in str(error.value)


# --- tokens of older weights


def stale(max_staleness, **loss):
    cfg = config(**loss)
    return replace(cfg, rollout=replace(cfg.rollout, max_staleness=max_staleness))


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"old_logp": "recomputed", "epochs": 2},
        {"preset": "disabled"},
        {"objective": "reinforce"},
        {"objective": "reinforce", "old_logp": "rollout"},  # takes no ratio
    ],
)
def test_stale_tokens_need_a_loss_for_them(loss):
    algorithm_from_config(stale(0, **loss))
    with pytest.raises(ConfigError, match="rollout.max_staleness=2 trains on tokens of older"):
        algorithm_from_config(stale(2, **loss))


@pytest.mark.parametrize(
    "loss",
    [
        {CORR: "token_is(high=2.0)"},
        {"old_logp": "rollout"},
        {"old_logp": "recomputed", "epochs": 2, CORR: "token_icepop"},
        {CORR: "rejection(statistic='seq_mean_k3', high=0.01)"},
        {"preset": "bypass_ppo_clip"},
        {"preset": "bypass_pg_is"},
        {"preset": "decoupled_token_is"},
    ],
)
def test_a_correction_or_engine_log_probs_suffice(loss):
    algorithm_from_config(stale(2, **loss))


def arrays_of(old_logp_BT, rollout_logp_BT, mask_BT, advantages_BT=0.0):
    return dict(
        old_logp_BT=old_logp_BT,
        rollout_logp_BT=rollout_logp_BT,
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        batch_mask_BT=mask_BT,
    )


MU = np.array([0.5, 0.25, 0.25])  # what drew the tokens: of four, two are 0, one is 1, one is 2
DRAWN, GAINS = jnp.array([0, 0, 1, 2]), jnp.array([1.0, 1.0, -2.0, 3.0])
POLICY_LOGP = jnp.log(jnp.array([0.55, 0.22, 0.23]))  # the policy; every ratio is inside PPO's clip


def gradient_on_stale_tokens(**loss):
    """Gradient of the loss at POLICY_LOGP, on tokens whose frequencies are exactly MU's."""
    a = (
        algorithm_from_config(stale(1, **loss))
        if loss.pop("checked", True)
        else algorithm_from_config(config(**loss))
    )
    mask = jnp.ones((4, 1), bool)
    rollout_logp, advantages = jnp.log(jnp.asarray(MU))[DRAWN][:, None], GAINS[:, None]
    batch = Batch(
        None,
        None,
        mask.astype(jnp.int32),
        mask,
        rollout_logp,
        None,
        advantages_BT=advantages,
        loss_weights_BT=jnp.full(mask.shape, 1 / 4),
        shared={"total": jnp.float32(4)},
    )

    def loss_at(logits):
        logp = jax.nn.log_softmax(logits)[DRAWN][:, None]
        old = jax.lax.stop_gradient(logp)  # recomputed by the newest trainer
        correction = compute_correction(a, arrays_of(old, rollout_logp, mask, advantages))
        scored = replace(batch, old_logp_BT=old, correction=correction)
        return sum_terms(a, scored, {"logp_BT": logp, "entropy_BT": old})[0]

    return -jax.grad(loss_at)(POLICY_LOGP)


def test_only_recipes_for_stale_tokens_are_unbiased():
    """E_π[A·∇log π] of the policy as it is now, from tokens that another one drew."""
    gain = jnp.array([1.0, -2.0, 3.0])  # by token
    want = jax.grad(lambda logits: jnp.sum(jax.nn.softmax(logits) * gain))(POLICY_LOGP)
    biased = jax.grad(lambda logits: jnp.sum(MU * gain * jax.nn.log_softmax(logits)))(POLICY_LOGP)
    for loss in (
        {CORR: "token_is(high=2.0)"},
        {CORR: "token_is(high=2.0)", "old_logp": "recomputed", "epochs": 2},
        {"old_logp": "rollout"},
    ):
        np.testing.assert_allclose(gradient_on_stale_tokens(**loss), want, rtol=8 * EPS, atol=EPS)
    hidden = gradient_on_stale_tokens(checked=False)
    np.testing.assert_allclose(hidden, biased, rtol=8 * EPS, atol=EPS)
    assert np.abs(hidden - want).max() > 0.05


# --- corrections one after the other


def test_rejections_add_up_and_the_last_weights_stand():
    old, rollout = jnp.log(jnp.asarray([[4.0, 1.0], [1.0, 0.2], [1.0, 1.0]])), jnp.zeros((3, 2))
    mask = jnp.ones((3, 2), bool)
    a = Algorithm(
        rollout_correction=(
            partial(losses.rejection, statistic="token_k1", low=0.0, high=2.0),
            partial(losses.token_is, high=8.0),
            partial(losses.rejection, statistic="token_k1", low=0.5, high=9.0),
            losses.normalize,
        )
    )
    correction = compute_correction(a, arrays_of(old, rollout, mask))
    assert correction.keep_BT.tolist() == [[False, True], [True, False], [True, True]]
    mean = (4 + 1 + 1 + 0.2 + 1 + 1) / 6
    np.testing.assert_allclose(correction.weights_BT, jnp.exp(old) / mean, rtol=8 * EPS)
    np.testing.assert_allclose(correction.bounded_BT, jnp.exp(old), rtol=8 * EPS)
    np.testing.assert_allclose(correction.ratio_BT, jnp.exp(old), rtol=8 * EPS)


def documented_rows():
    text = (Path(__file__).parents[3] / "docs/algorithms.md").read_text()
    rows = text.split("<!-- algorithms -->")[1].split("\n\n")[0].strip().splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in rows]


@pytest.mark.parametrize("name, changes", documented_rows())
def test_each_algorithm_of_the_docs_is_one(name, changes):
    settings = re.findall(r"`([^`]+)`", changes)
    assert settings or "default" in changes
    algorithm_from_config(override(load_config("tiny.py"), *settings))
