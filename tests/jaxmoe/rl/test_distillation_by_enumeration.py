# SPDX-License-Identifier: Apache-2.0
"""A teacher's gradients over every answer to the end, in which each prefix has its own logits."""

from dataclasses import dataclass, replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, EPS, OPS, SGD, start, step_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.batches.batch import Batch
from jaxmoe.config import DistillConfig
from jaxmoe.model.ops import invariant_ops
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.distillation import teacher_terms
from jaxmoe.rl.scorer import Scorer

WORDS, END, LONGEST = 3, 3, 6  # the last of the four ids ends an answer
PREFIXES = sum(WORDS**n for n in range(LONGEST))
ROWS = 1096  # of 1,093 answers of up to six tokens; a multiple of a group
REVERSE = tuple(teacher_terms(DistillConfig(teacher="base", reverse_kl_coef=1.0)))


@dataclass(frozen=True)
class Tabular(Scorer):
    """Any policy of such answers: the embeddings are the logits after each prefix."""

    def run_forward(self, params, batch):
        return params["embed"][batch.extra["prefix_BT"]], {}


MODEL = replace(CFG, vocab_size=WORDS + 1)
# An equal teacher has equal log-probs, in a forward without a gradient too.
INVARIANT = invariant_ops(OPS)
SCORER = Tabular(MODEL, INVARIANT, teacher=Tabular(MODEL, INVARIANT))


def list_answers(longest):
    """Every answer that the end ends, or the limit."""
    for n in range(1, longest + 1):
        for words in product(range(WORDS), repeat=n - 1):
            yield (*words, END)
    yield from product(range(WORDS), repeat=longest)


def enumerate_answers(longest):
    """Return tokens, the prefix before each, and the mask; columns [1, LONGEST] are the answer."""
    prefixes = {
        words: i
        for i, words in enumerate(
            words for n in range(LONGEST) for words in product(range(WORDS), repeat=n)
        )
    }
    tokens_BT, prefix_BT = np.zeros((2, ROWS, LONGEST + 1), np.int32)
    mask_BT = np.zeros(tokens_BT.shape, bool)
    for b, answer in enumerate(list_answers(longest)):
        n = len(answer)
        tokens_BT[b, 1 : n + 1], mask_BT[b, 1 : n + 1] = answer, True
        prefix_BT[b, :n] = [prefixes[answer[:t]] for t in range(n)]
    return tokens_BT, prefix_BT, mask_BT


def by_probability(mask_BT, weight_B):
    return jnp.where(mask_BT, weight_B[:, None], 0.0)


FORMS = [
    Algorithm(aggregation=by_probability, reward_coef=0.0, **fields)
    for fields in ({"teacher_coef": 1.0}, {"terms": REVERSE})
]
STEPS = [step_of(a, scorer=SCORER) for a in FORMS]


def take_steps(policy, teacher, answers, weights_B):
    """The gradient and the loss of the sampled form and of the exact one, by the product's step."""
    tokens_BT, prefix_BT, mask_BT = answers
    batch = Batch(
        tokens_BT=tokens_BT,
        positions_BT=np.broadcast_to(np.arange(LONGEST + 1, dtype=np.int32), tokens_BT.shape),
        segment_ids_BT=np.ones(tokens_BT.shape, np.int32),
        loss_mask_BT=mask_BT,
        rollout_logp_BT=np.zeros(tokens_BT.shape, np.float32),
        rewards_B=np.zeros(ROWS, np.float32),
        samples_per_prompt=4,
        extra={"prefix_BT": prefix_BT, "weight_B": weights_B.astype(np.float32)},
    )
    head = jnp.eye(WORDS + 1)
    policy, teacher = ({"embed": jnp.float32(x), "head": head} for x in (policy, teacher))
    gradients, losses = [], []
    for a, step in zip(FORMS, STEPS, strict=True):
        new, metrics = step(start(a, SGD, policy), batch, None, None, teacher)
        gradients.append(np.asarray(policy["embed"] - new.params.policy["embed"]))
        losses.append(float(metrics["loss"]))
    return gradients, losses


def score_rows(logits, answers):
    """log-probs [B, T, V] after each prefix of the rows, and those of the tokens, 0 if masked."""
    tokens_BT, prefix_BT, mask_BT = answers
    logp_BTV = jax.nn.log_softmax(logits)[prefix_BT[:, :-1]]
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    return logp_BTV, jnp.where(mask_BT[:, 1:], logp_BT, 0.0)


def divergences(policy, teacher, answers):
    """KL(policy, teacher) of the distribution of each token [B, T]."""
    p_BTV, q_BTV = (score_rows(logits, answers)[0] for logits in (policy, teacher))
    return jnp.where(answers[2][:, 1:], jnp.sum(jnp.exp(p_BTV) * (p_BTV - q_BTV), axis=-1), 0.0)


def probability(logits, answers):
    logp_B = jnp.sum(score_rows(logits, answers)[1], axis=1)
    return jnp.where(answers[2].any(axis=1), jnp.exp(logp_B), 0.0)


def given_prefixes(policy, teacher, answers, sampler):
    """Expected sum of the tokens' divergences over the answers of a sampler."""
    weights_B = probability(sampler, answers)
    return jnp.sum(weights_B * jnp.sum(divergences(policy, teacher, answers), axis=1))


def of_sequences(policy, teacher, answers):
    """KL of the distributions of complete answers."""
    p_BT, q_BT = (score_rows(logits, answers)[1] for logits in (policy, teacher))
    return jnp.sum(probability(policy, answers) * jnp.sum(p_BT - q_BT, axis=1))


def later_divergences(policy, teacher, answers, sampler):
    """A policy gradient's objective, whose advantages are the divergences after each token."""
    kl_BT = divergences(sampler, teacher, answers)
    later_BT = jnp.cumsum(kl_BT[:, ::-1], axis=1)[:, ::-1] - kl_BT
    weights_B = probability(sampler, answers)
    return jnp.sum(weights_B[:, None] * score_rows(policy, answers)[1] * later_BT)


@jax.jit
def differentiate(policy, teacher, answers, direction):
    """The probability of each answer, gradients of the three objectives, and the slopes of the
    first two along a direction by central differences."""

    def tokens_kl(logits):
        return given_prefixes(logits, teacher, answers, policy)

    def sequences_kl(logits):
        return of_sequences(logits, teacher, answers)

    gradients = [jax.grad(f)(policy) for f in (tokens_kl, sequences_kl)]
    gradients.append(jax.grad(later_divergences)(policy, teacher, answers, policy))
    step = 1e-5 * direction
    slopes = [(f(policy + step) - f(policy - step)) / 2e-5 for f in (tokens_kl, sequences_kl)]
    return probability(policy, answers), gradients, slopes


def draw_logits(rng, scale):
    """Logits that are the same numbers in float32 and float64."""
    return np.float32(scale * rng.normal(size=(PREFIXES, WORDS + 1))).astype(np.float64)


@settings(max_examples=6)
@given(st.integers(2, LONGEST), st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0, 2.0]))
def test_both_forms_have_the_gradient_given_prefixes(longest, seed, scale):
    """Expected over all answers, the sampled form and the exact one are the gradient of the
    tokens' divergences with the probabilities of prefixes held constant. The gradient of the
    KL of complete answers also has each token's effect on the divergences after it."""
    rng, answers = np.random.default_rng(seed), enumerate_answers(longest)
    policy, teacher, direction = (draw_logits(rng, x) for x in (scale, scale, 1.0))
    with jax.enable_x64(True):
        weights_B, gradients, slopes = jax.device_get(
            differentiate(policy, teacher, answers, direction)
        )
    np.testing.assert_allclose(weights_B.sum(), 1.0, rtol=1e-12)
    of_tokens, complete, later = gradients
    along = [np.sum(x * direction) for x in (of_tokens, complete)]
    np.testing.assert_allclose(along, slopes, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(complete, of_tokens + later, atol=1e-12)
    (sampled, exact), _ = take_steps(policy, teacher, answers, weights_B)
    # A log-prob is rounded at its own size, and each of the tokens adds one.
    atol = 2 * longest * EPS * (1 + np.abs(policy).max() + np.abs(teacher).max())
    for gradient in (sampled, exact):
        np.testing.assert_allclose(gradient, of_tokens, rtol=0, atol=atol)
    np.testing.assert_allclose(sampled, exact, rtol=0, atol=atol)
    missed = np.linalg.norm(sampled - complete)
    np.testing.assert_allclose(missed, np.linalg.norm(later), rtol=1e-3)
    assert missed > 0.01 * np.linalg.norm(complete) and missed > 100 * atol


@pytest.mark.parametrize("longest", [2, LONGEST])
def test_an_equal_teacher_has_zero_loss_and_gradient(longest):
    answers = enumerate_answers(longest)
    policy = draw_logits(np.random.default_rng(longest), 2.0)
    gradients, losses = take_steps(policy, policy, answers, np.full(ROWS, 1 / ROWS))
    assert losses == [0.0, 0.0] and not np.any(gradients)
