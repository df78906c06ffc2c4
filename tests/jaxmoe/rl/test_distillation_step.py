# SPDX-License-Identifier: Apache-2.0
"""A step with a teacher: its gradient by enumeration, exact zeros, and layouts of the rows."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, MODEL, OPS, SGD, Bigram, T, algorithm, make_batch, start, step_of

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.config import ConfigError, DistillConfig
from jaxmoe.losses import reinforce
from jaxmoe.model.ops import invariant_ops
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.distillation import teacher_terms
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.terms import Term
from tests.jaxmoe.random_weights import random_weights

WORDS, ANSWER = 4, 3  # a vocabulary whose answers can all be listed
SMALL = replace(CFG, vocab_size=WORDS)
WIDER = replace(SMALL, d_model=32)
REVERSE, FORWARD = (
    teacher_terms(DistillConfig(teacher="base", **{f"{name}_kl_coef": 1.0}))
    for name in ("reverse", "forward")
)


def draw_params(cfg, seed):
    dice, shape = np.random.default_rng(seed), (cfg.vocab_size, cfg.d_model)
    return {
        "embed": jnp.asarray(dice.normal(size=shape), jnp.float32),
        "head": jnp.asarray(dice.normal(size=shape[::-1]) / 4, jnp.float32),
    }


STUDENT, TEACHER = draw_params(SMALL, 0), draw_params(WIDER, 1)
TEACHER_SCORER = Bigram(WIDER, OPS)


def log_table(params):
    """Log-probs [V, V] of each token after each other."""
    return jax.nn.log_softmax(jnp.tanh(params["embed"]) @ params["head"])


def all_answers():
    """Every answer to the prompt [0], with the probability of each."""
    answers = np.array(list(product(range(WORDS), repeat=ANSWER)))
    tokens = np.pad(answers, ((0, 0), (1, 0))).astype(np.int32)
    table = np.asarray(log_table(STUDENT), np.float64)
    logp = sum(table[tokens[:, t], tokens[:, t + 1]] for t in range(ANSWER))
    shape = tokens.shape
    batch = Batch(
        tokens_BT=tokens,
        positions_BT=np.broadcast_to(np.arange(ANSWER + 1, dtype=np.int32), shape),
        segment_ids_BT=np.ones(shape, np.int32),
        loss_mask_BT=np.broadcast_to(np.arange(ANSWER + 1) > 0, shape).copy(),
        rollout_logp_BT=np.zeros(shape, np.float32),
        rewards_B=np.zeros(len(tokens), np.float32),
        samples_per_prompt=4,
        extra={"weight_B": np.exp(logp).astype(np.float32)},
    )
    return batch


def by_probability(mask_BT, weight_B):
    return jnp.where(mask_BT, weight_B[:, None], 0.0)


def gradient_of(batch, teacher=TEACHER, scorer=TEACHER_SCORER, cfg=SMALL, **fields):
    """The gradient of a step on all answers: SGD's update with rate 1, negated."""
    a = algorithm_of(batch, **fields)
    state = start(a, SGD, STUDENT)
    step = step_of(a, scorer=Bigram(cfg, OPS, teacher=scorer))
    new, metrics = step(state, batch, None, None, teacher)
    return jax.tree.map(jnp.subtract, state.params.policy, new.params.policy), metrics


def algorithm_of(batch, **fields):
    weighted = {"aggregation": by_probability} if "weight_B" in batch.extra else {}
    return Algorithm(**(weighted | fields))


def per_token_kl(params, kind):
    """Σ over prefixes of their probability, without a gradient, times the KL after them."""
    log_p, log_q = log_table(params), log_table(TEACHER)
    gap = log_p - log_q
    if kind == "reverse":
        kl_V = jnp.sum(jnp.exp(log_p) * gap, axis=1)
    else:
        kl_V = -jnp.sum(jnp.exp(log_q) * gap, axis=1)
    step = np.exp(np.asarray(log_table(STUDENT), np.float64))
    visits, before = np.zeros(WORDS), np.eye(WORDS)[0]
    for _ in range(ANSWER):
        visits, before = visits + before, before @ step
    return jnp.sum(jnp.asarray(visits, jnp.float32) * kl_V)


FORMS = {
    "sampled": ("reverse", {"teacher_coef": 1.0, "objective": reinforce}),
    "reverse": ("reverse", {"terms": tuple(REVERSE)}),
    "forward": ("forward", {"terms": tuple(FORWARD)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_its_divergences_gradient(form):
    """Over all answers the sampled form is the exact gradient of the KL of each token, in which
    the tokens before are given; it is not that of a sequence's KL."""
    kind, fields = FORMS[form]
    gradient, metrics = gradient_of(all_answers(), reward_coef=0.0, **fields)
    want = jax.grad(partial(per_token_kl, kind=kind))(STUDENT)
    for name, x in want.items():
        np.testing.assert_allclose(gradient[name], x, rtol=2e-5, atol=2e-6)
    assert float(metrics["grad/norm"]) > 0.1


def test_metrics_are_of_the_advantages_trained_on():
    batch = all_answers()
    _, metrics = gradient_of(batch, reward_coef=0.0, teacher_coef=1.0, old_logp="rollout")
    gap = np.asarray(log_table(TEACHER), np.float64)[
        batch.tokens_BT[:, :-1], batch.tokens_BT[:, 1:]
    ]
    mask = np.asarray(batch.loss_mask_BT)[:, 1:]
    advantages = gap - np.asarray(batch.rollout_logp_BT, np.float64)[:, 1:]
    expected = np.abs(advantages)[mask].mean()
    assert float(metrics["policy/advantage_abs_mean"]) == pytest.approx(expected, rel=1e-5)
    # log-probs of the engine are 0 here, so every ratio is below 1 - 0.2 or near it
    assert float(metrics["policy/clip_frac"]) > 0.5


def test_a_term_of_the_users_takes_the_divergences():
    def halve(teacher_reverse_kl_BT, teacher_logp_BT, mask_BT):
        return jnp.where(mask_BT, teacher_reverse_kl_BT + 0.0 * teacher_logp_BT, 0.0) / 2

    own, _ = gradient_of(all_answers(), reward_coef=0.0, terms=(Term(halve),))
    exact, _ = gradient_of(all_answers(), reward_coef=0.0, terms=tuple(REVERSE))
    for name, x in exact.items():
        np.testing.assert_allclose(2 * own[name], x, rtol=1e-5, atol=1e-6)


def test_annealing_takes_the_teacher_away():
    fields = {"teacher_coef": 1.0, "anneal_steps": 4, "reward_coef": 0.0, "objective": reinforce}
    first, _ = gradient_of(all_answers(), **fields)
    third, _ = gradient_of(replace(all_answers(), shared={"step": np.int32(3)}), **fields)
    last, _ = gradient_of(replace(all_answers(), shared={"step": np.int32(4)}), **fields)
    np.testing.assert_allclose(4 * third["head"], first["head"], rtol=1e-5, atol=1e-7)
    assert not np.asarray(last["head"]).any() and np.asarray(first["head"]).any()


def test_a_servers_log_probs_come_from_the_batch():
    fields = {"teacher_coef": 1.0, "reward_coef": 0.0}
    batch, table = all_answers(), np.asarray(log_table(TEACHER))
    tokens = np.asarray(batch.tokens_BT)
    logp_BT = np.pad(table[tokens[:, :-1], tokens[:, 1:]], ((0, 0), (1, 0)))
    scored, _ = gradient_of(batch, **fields)
    sent, _ = gradient_of(
        replace(batch, teacher_logp_BT=logp_BT), teacher=None, scorer=None, **fields
    )
    for name, x in scored.items():
        np.testing.assert_allclose(sent[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fields", [{"teacher_coef": 1.0}, {"terms": tuple(REVERSE)}])
def test_a_step_without_its_teacher_is_refused(fields):
    with pytest.raises(ConfigError, match="needs a teacher, and the step has none"):
        gradient_of(all_answers(), teacher=None, scorer=None, **fields)


def take_step(params, scorer, batch, **options):
    fields = {"reward_coef": 0.0} | options.pop("fields", {})
    a = algorithm(**fields)
    step = step_of(a, scorer=scorer, **options)
    state = start(a, SGD, params)
    teacher = MODEL if scorer.teacher.model == CFG else OTHER
    new, metrics = step(state, batch, None, None, teacher)
    return state, new, metrics


OTHER_CFG = replace(CFG, d_model=32, n_layers=1, d_expert=24)
OTHER = random_weights(OTHER_CFG, 7)
TERMS = teacher_terms(DistillConfig(teacher="base", reverse_kl_coef=1.0, forward_kl_coef=0.5))
BOTH = {"teacher_coef": 0.5, "reward_coef": 1.0, "terms": tuple(TERMS)}


@pytest.mark.parametrize("form", ["exact", pytest.param("invariant", marks=pytest.mark.slow)])
def test_a_teacher_equal_to_the_student_changes_nothing(form):
    ops = invariant_ops(OPS) if form == "invariant" else OPS
    scorer = Scorer(CFG, ops, teacher=Scorer(CFG, ops))
    fields = {"terms": tuple(REVERSE)}
    if form == "invariant":
        fields["teacher_coef"] = 1.0
    before, after, metrics = take_step(MODEL, scorer, make_batch(), fields=fields)
    assert float(metrics["distill/reverse_kl"]) == 0 == float(metrics["distill/forward_kl"])
    assert float(metrics["loss"]) == 0 == float(metrics["grad/norm"])
    for x, y in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow  # four programs of a model
def test_the_layout_of_rows_changes_rounding_alone():
    scorer = Scorer(CFG, OPS, 0.7, teacher=Scorer(OTHER_CFG, OPS, 0.7))
    layouts = {
        "microbatches": (make_batch(), {"microbatches": 2}),
        "packed": (
            split_minibatches(make_batch(), algorithm(), seed=(0,), tokens_per_microbatch=2 * T)[0],
            {},
        ),
        "shared": (
            split_minibatches(
                make_batch(), algorithm(), seed=(0,), sharing=PromptSharing(length=2 * T, rows=2)
            )[0],
            {},
        ),
    }
    _, want, expected = take_step(MODEL, scorer, make_batch(), fields=BOTH)
    assert float(expected["distill/reverse_kl"]) > 0.01
    for batch, options in layouts.values():
        _, new, metrics = take_step(MODEL, scorer, batch, fields=BOTH, **options)
        for name, x in expected.items():
            np.testing.assert_allclose(metrics[name], x, rtol=2e-4, atol=2e-5, err_msg=name)
        for x, y in zip(jax.tree.leaves(new.params), jax.tree.leaves(want.params), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
