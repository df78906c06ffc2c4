# SPDX-License-Identifier: Apache-2.0
"""Arrays of the user's reach every function of the loss by name, or are refused before work."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, OPS, B, Bigram, R, T, make_batch, start, step_of

from jaxmoe.config import ConfigError
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.terms import Term
from jaxmoe.rl.validate import check_algorithm

VALUES = np.random.default_rng(5).normal(size=(B, T)).astype(np.float32)
BATCH = replace(make_batch(), extra={"rm_values_BT": VALUES}, shared={"scale": np.float32(3.0)})


def scaled_values(rm_values_BT, scale, mask_BT):
    return scale * rm_values_BT


def keep_positive(rm_values_BT, mask_BT):
    return Correction(keep_BT=rm_values_BT > 0)


def share_by_value(mask_BT, rm_values_BT):
    return jnp.where(mask_BT, rm_values_BT**2, 0.0)


def weighted_reinforce(logp_BT, advantages_BT, rm_values_BT, mask_BT):
    return jnp.where(mask_BT, -logp_BT * advantages_BT * rm_values_BT, 0.0)


def measure_value(rm_values_BT, scale):
    return scale * rm_values_BT


@pytest.mark.parametrize("old_logp", ["detached", "recomputed"])
def test_own_arrays_reach_every_function(old_logp):
    a = Algorithm(
        objective=weighted_reinforce,
        advantages=scaled_values,
        aggregation=share_by_value,
        rollout_correction=(keep_positive,),
        terms=(Term(measure_value, 0.0, "value"),),
        old_logp=old_logp,
    )
    _, metrics = step_of(a)(start(a), BATCH)
    mask, scorer = BATCH.loss_mask_BT, Bigram(CFG, OPS)
    rows = jax.tree.map(jnp.asarray, BATCH)
    logp = np.asarray(scorer.score_policy(start(a).params, rows)["logp_BT"])
    weights = np.where(mask & (VALUES > 0), VALUES**2, 0.0)
    want = np.sum(weights * -logp * 3 * VALUES * VALUES)
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-4)
    assert float(metrics["value"]) == pytest.approx(3 * VALUES[mask].mean(), rel=1e-4)


@dataclass(frozen=True)
class Recording(Bigram):
    """Records the position of each token, twice for two layers."""

    def recorded_sizes(self):
        return {"place_BTL": (2,)}

    def run_forward(self, params, batch):
        rows = batch if batch.packed is None else batch.packed
        place_BT = jnp.asarray(rows.positions_BT, jnp.float32)
        return super().run_forward(params, batch)[0], {"place_BT": jnp.stack([place_BT] * 2)}


@pytest.mark.parametrize("split", [{}, {"tokens_per_microbatch": 24}])
def test_advantages_take_what_the_first_forward_recorded(split):
    def by_place(place_BTL, mask_BT):
        return place_BTL[..., 1]

    a = Algorithm(advantages=by_place, objective=lambda advantages_BT, mask_BT: advantages_BT)
    batch, _ = split_minibatches(make_batch(), a, seed=(0,), **split)
    _, metrics = step_of(a, scorer=Recording(CFG, OPS))(start(a), batch)
    mask = batch.loss_mask_BT
    assert float(metrics["loss"]) == pytest.approx(np.nonzero(mask)[1].mean(), rel=1e-5)


UNKNOWN = {
    "loss.advantages": dict(advantages=scaled_values),
    "loss.rollout_correction": dict(rollout_correction=(keep_positive,)),
    "loss.terms": dict(terms=(Term(measure_value),)),
    "loss.objective": dict(objective=measure_value),
    "loss.aggregation": dict(aggregation=share_by_value),
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_array_that_no_step_has_is_refused(key):
    a = Algorithm(**UNKNOWN[key])
    name = r" takes rm_values_BT, which this step does not have\. It may take .*mask_BT"
    message = key + r": \w+" + name + r".*Batch\(extra=\{'rm_values_BT': …\}\)"
    with pytest.raises(ConfigError, match=message):
        check_algorithm(a, R)
    with pytest.raises(ConfigError, match=message):
        step_of(a)(start(a), make_batch())
    check_algorithm(a, R, batch=BATCH)
