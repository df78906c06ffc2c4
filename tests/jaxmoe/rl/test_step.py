# SPDX-License-Identifier: Apache-2.0
"""The step: the same update however the batch is cut or padded, one compilation, any loss."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG, PARAMS, Bigram

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.microbatches import LossAux, pack_sequences
from jaxmoe.model import init_params, plain_ops
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.step import supervised_loss_fn, train_step

EPS = float(np.finfo(np.float32).eps)
B, T = 4, 12
SGD = optax.sgd(1.0)  # the update is minus the gradient
SCORER = Scorer(CFG, plain_ops())
LOSS = partial(supervised_loss_fn, scorer=SCORER)


def make_batch(extra=0):
    """Rows of 6 to 12 tokens, padded on the right by `extra` more columns."""
    rng = np.random.default_rng(0)
    ends, time = np.array([12, 9, 6, 11])[:, None], np.arange(T)[None, :]
    mask = (time >= 3) & (time < ends)

    def widen(x, fill=0):
        return np.pad(x, ((0, 0), (0, extra)), constant_values=fill)

    length = T + extra
    return Batch(
        tokens_BT=widen(np.where(time < ends, rng.integers(0, 29, (B, T)), 0).astype(np.int32)),
        positions_BT=np.broadcast_to(np.arange(length, dtype=np.int32), (B, length)),
        segment_ids_BT=widen((time < ends).astype(np.int32)),
        loss_mask_BT=widen(mask),
        rollout_logp_BT=widen(np.where(mask, -3.0, 0.0).astype(np.float32)),
        rewards_B=rng.normal(size=B).astype(np.float32),
    )


def start(tx=SGD):
    return init_state(Trained(init_params(jax.random.key(0), CFG)), tx)


def step_of(loss_fn=LOSS, tx=SGD, microbatches=1):
    return jax.jit(partial(train_step, tx=tx, loss_fn=loss_fn, microbatches=microbatches))


STEP = step_of()  # shared: one compilation for the whole batch and for its rows


@pytest.fixture(scope="module")
def full_update():
    return STEP(start(), make_batch())


@pytest.fixture(scope="module")
def spread():
    """Per parameter, the bound on summing its gradient's tokens in another order.

    n terms added in any two orders differ by at most n·eps·Σ|term|. Σ over rows of |the row's
    gradient| stands for Σ|term|, taken at each tensor's largest entry; the parameter itself
    rounds once when the update is added.
    """
    batch, before = make_batch(), start()
    mask, rows = batch.loss_mask_BT, []
    for i in range(B):
        row_mask = mask & (np.arange(B) == i)[:, None]
        after, _ = STEP(before, replace(batch, loss_mask_BT=row_mask))
        share = np.float32(row_mask.sum() / mask.sum())  # alone, it divides by its own tokens
        rows.append(jax.tree.map(lambda p, q, s=share: (p - q) * s, before.params, after.params))
    params = before.params
    size = jax.tree.map(lambda *g: float(np.max(sum(np.abs(x) for x in g))), *rows)
    return jax.tree.map(lambda s, p: EPS * (B * T * s + float(np.max(np.abs(p)))), size, params)


def same_update(update, want, spread):
    def check(path, a, b, bound):
        worst = float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: {worst} > {bound}"

    jax.tree_util.tree_map_with_path(check, update[0].params, want[0].params, spread)
    assert update[1].keys() == want[1].keys()
    for name in want[1]:
        a, b = float(update[1][name]), float(want[1][name])
        assert abs(a - b) <= B * T * EPS * max(1.0, abs(b)) * 4, name


def test_cutting_the_batch_does_not_change_the_update(full_update, spread):
    update = step_of(microbatches=4)(start(), make_batch())
    same_update(update, full_update, spread)


def test_columns_of_padding_do_not_change_the_update(full_update, spread):
    same_update(STEP(start(), make_batch(extra=5)), full_update, spread)


def test_three_steps_compile_once_and_donate_the_state():
    calls = []

    def traced(*arguments):
        calls.append(1)
        return supervised_loss_fn(*arguments, scorer=Bigram(CFG, plain_ops()))

    tx = optax.adam(1e-2)
    step = jax.jit(partial(train_step, tx=tx, loss_fn=traced), donate_argnums=0)
    state, losses, batch = init_state(Trained(jax.tree.map(jnp.copy, PARAMS)), tx), [], make_batch()
    first = state
    for _ in range(8):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert len(calls) == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    assert losses[-1] < losses[0] and int(state.step) == 8


def test_another_objective_is_another_function():
    def quadratic(params, frozen, batch):
        aux = LossAux(sums={"mine": batch.shared["total"]})
        return jnp.sum(params.policy["final_norm"] ** 2) / 2, aux

    state, metrics = step_of(quadratic)(start(), make_batch())
    assert not np.any(np.asarray(state.params.policy["final_norm"]))  # x - 1.0 * x
    assert float(metrics["mine"]) == make_batch().loss_mask_BT.sum()


@pytest.mark.parametrize("cut", ["whole", "cut", "packed"])
def test_losses_define_how_their_metrics_merge(cut):
    """x_min of 3 and 3 is 3 however it is called; the largest of negative numbers is negative."""

    def loss(params, frozen, batch):
        tokens = jnp.sum(jnp.asarray(batch.loss_mask_BT).astype(jnp.float32))
        aux = LossAux(
            sums={"sum_min": tokens},
            maxima={"x_min": 3.0 + 0.0 * tokens, "below": -tokens},
            minima={"x_max": tokens},
            rows={"row": jnp.asarray(batch.loss_mask_BT)},
        )
        return jnp.sum(params.policy["final_norm"]) * tokens / batch.shared["total"], aux

    batch = make_batch()
    if cut == "packed":
        lengths = np.asarray(batch.segment_ids_BT).sum(axis=1)
        batch = replace(batch, packing=pack_sequences(lengths, length=T, rows=1))
        assert int(batch.packing.count) > 1
    _, metrics = step_of(loss, microbatches=2 if cut == "cut" else 1)(start(), batch)
    rows = batch.loss_mask_BT.sum(axis=1)
    parts = {
        "whole": [rows.sum()],
        "cut": [rows[:2].sum(), rows[2:].sum()],
        "packed": []
        if cut != "packed"
        else [rows[batch.packing.microbatch_B == i].sum() for i in range(int(batch.packing.count))],
    }[cut]
    assert float(metrics["sum_min"]) == rows.sum() and float(metrics["x_min"]) == 3.0
    assert float(metrics["below"]) == -min(parts) and float(metrics["x_max"]) == min(parts)
    assert "row" not in metrics
