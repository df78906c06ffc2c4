# SPDX-License-Identifier: Apache-2.0
"""A warm start with a teacher: its loss and gradient in float64, microbatches, and exact zeros."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from bigram import CFG, OPS, PARAMS, SGD, Bigram, make_batch

from jaxmoe.model import init_params
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.step import supervised_loss_fn, train_step

WIDER = replace(CFG, d_model=2 * CFG.d_model)
TEACHER = {k: 4 * v for k, v in init_params(jax.random.key(5), WIDER).items() if k != "layers"}
SCORER = Bigram(CFG, OPS, teacher=Bigram(WIDER, OPS))


def step_of(share, scorer=SCORER, **options):
    loss_fn = partial(supervised_loss_fn, scorer=scorer, teacher_share=share)
    return jax.jit(partial(train_step, tx=SGD, loss_fn=loss_fn, **options))


def start():
    return init_state(Trained(PARAMS), SGD)


def head_logits(params, batch):
    tanh = np.tanh(np.asarray(params["embed"], np.float64)[batch.tokens_BT])
    return tanh, tanh @ np.asarray(params["head"], np.float64)


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_the_divergence_is_float64s(share):
    batch = make_batch()
    # log-probs and mask belong to a token, logits to the one before it
    tanh, logits = (x[:, :-1] for x in head_logits(PARAMS, batch))
    p, q = softmax(logits), softmax(head_logits(TEACHER, batch)[1][:, :-1])
    mask, answer = batch.loss_mask_BT[:, 1:], np.eye(CFG.vocab_size)[batch.tokens_BT[:, 1:]]
    cross, kl = -(answer * np.log(p)).sum(-1), (q * np.log(q / p)).sum(-1)
    weight = mask / mask.sum()
    expected = (weight * ((1 - share) * cross + share * kl)).sum()
    slope = weight[..., None] * (p - (1 - share) * answer - share * q)
    gradient = np.einsum("btd,btv->dv", tanh, slope)

    for microbatches in (1, 2):
        new, metrics = step_of(share, microbatches=microbatches)(start(), batch, TEACHER)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-6)
        np.testing.assert_allclose(metrics["distill/forward_kl"], (weight * kl).sum(), rtol=2e-6)
        update = np.asarray(PARAMS["head"]) - np.asarray(new.policy["head"])
        np.testing.assert_allclose(update, gradient, atol=2e-6 * np.abs(gradient).max())


def test_a_teacher_equal_to_the_policy_teaches_nothing():
    scorer = Bigram(CFG, OPS, teacher=Bigram(CFG, OPS))
    new, metrics = step_of(1.0, scorer)(start(), make_batch(), PARAMS)
    assert metrics["loss"] == metrics["grad/norm"] == 0.0
    np.testing.assert_array_equal(new.policy["head"], PARAMS["head"])


def test_a_warm_start_without_teacher_is_cross_entropy():
    batch = make_batch()
    plain = Bigram(CFG, OPS)
    new, metrics = step_of(0.0, plain)(start(), batch)
    same, others = step_of(0.0)(start(), batch, TEACHER)
    assert metrics.keys() == others.keys() == {"loss", "grad/norm"}
    np.testing.assert_array_equal(new.policy["head"], same.policy["head"])
