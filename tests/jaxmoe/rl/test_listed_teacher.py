# SPDX-License-Identifier: Apache-2.0
"""A step with a teacher's listed words, as with its weights; layouts of the rows, and refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, OPS, PARAMS, SGD, B, Bigram, T, algorithm, make_batch, start, step_of

from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.config import ConfigError, DistillConfig
from jaxmoe.losses.distillation import NO_WORD
from jaxmoe.rl.distillation import teacher_terms
from jaxmoe.rl.minibatches import split_minibatches

WIDER = replace(CFG, d_model=CFG.d_model + 8)
WORDS, K = CFG.vocab_size, 4
ALGORITHM = algorithm(
    reward_coef=0.5,
    terms=tuple(
        teacher_terms(DistillConfig(teacher="base", reverse_kl_coef=1.0, forward_kl_coef=0.5))
    ),
)


def draw_teacher():
    dice, shape = np.random.default_rng(1), (WORDS, WIDER.d_model)
    return {
        "embed": jnp.asarray(dice.normal(size=shape), jnp.float32),
        "head": jnp.asarray(dice.normal(size=shape[::-1]) / 4, jnp.float32),
    }


TEACHER = draw_teacher()


def log_table(params):
    """Log-probs [V, V] of each token after each other."""
    return np.asarray(jax.nn.log_softmax(jnp.tanh(params["embed"]) @ params["head"]))


def with_lists(batch, count, params=TEACHER):
    """The likeliest words at each trained token, as a server lists them."""
    table, tokens, mask = log_table(params), np.asarray(batch.tokens_BT), batch.loss_mask_BT
    order = np.argsort(-table, axis=1)[:, :count]
    before = np.roll(tokens, 1, axis=1)
    logp = np.take_along_axis(table, order, axis=1)[before]
    return replace(
        batch,
        teacher_top_ids_BTK=np.where(mask[..., None], order[before], -1).astype(np.int32),
        teacher_top_logp_BTK=np.where(mask[..., None], logp, NO_WORD).astype(np.float32),
    )


def take_step(batch, teacher=None, **options):
    """The weights after a step, and its metrics."""
    of_teacher = None if teacher is None else Bigram(WIDER, OPS)
    step = step_of(ALGORITHM, scorer=Bigram(CFG, OPS, teacher=of_teacher), **options)
    new, metrics = step(start(ALGORITHM, SGD), batch, None, None, teacher)
    return new.params.policy, metrics


def assert_steps_equal(got, want):
    for x, y in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for name, x in want[1].items():
        np.testing.assert_allclose(got[1][name], x, rtol=2e-4, atol=2e-5, err_msg=name)


def test_all_words_but_one_make_the_weights_step():
    assert_steps_equal(
        take_step(with_lists(make_batch(), WORDS - 1)), take_step(make_batch(), TEACHER)
    )


def test_fewer_words_have_smaller_divergences():
    complete, few = (take_step(with_lists(make_batch(), n))[1] for n in (WORDS - 1, K))
    for name in ("distill/reverse_kl", "distill/forward_kl"):
        assert 0.05 < float(few[name]) < float(complete[name])


def test_lists_of_the_policy_itself_change_nothing():
    policy, metrics = take_step(
        replace(with_lists(make_batch(), K, PARAMS), rewards_B=np.zeros(B, np.float32))
    )
    for name in ("distill/reverse_kl", "distill/forward_kl", "grad/norm"):
        assert 0 <= float(metrics[name]) < 3e-6
    for x, y in zip(jax.tree.leaves(policy), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_the_layout_of_lists_changes_rounding_alone():
    batch = with_lists(make_batch(), K)
    want = take_step(batch)
    layouts = {"tokens_per_microbatch": 2 * T}, {"sharing": PromptSharing(length=2 * T, rows=2)}
    for options in layouts:
        packed, _ = split_minibatches(batch, algorithm(), seed=(0,), **options)
        assert packed.packing is not None
        assert_steps_equal(take_step(packed), want)
    assert_steps_equal(take_step(batch, microbatches=2), want)


def test_lists_of_other_sizes_are_refused():
    batch = with_lists(make_batch(), K)
    for change in (
        {"teacher_top_logp_BTK": None},
        {"teacher_top_ids_BTK": batch.teacher_top_ids_BTK[..., 1:]},
        {"teacher_top_ids_BTK": batch.teacher_top_ids_BTK[:, 1:]},
    ):
        with pytest.raises(ConfigError, match="must both have K words for each of the"):
            take_step(replace(batch, **change))
    with pytest.raises(ConfigError, match="needs a teacher, and the step has none"):
        take_step(make_batch())
