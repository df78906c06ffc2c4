# SPDX-License-Identifier: Apache-2.0
"""Options out of range: each is refused by its function, in one line that names it."""

import inspect
from functools import partial

import jax.numpy as jnp
import pytest

from jaxmoe import losses
from jaxmoe.losses.options import POSITIVE, check_option

MASK, X = jnp.ones((2, 3), bool), jnp.full((2, 3), 0.5)
NAN = float("nan")
OBJECTIVE = dict(logp_BT=X, old_logp_BT=X, advantages_BT=X, mask_BT=MASK)
TERMS = {
    name: partial(getattr(losses, name), **OBJECTIVE)
    for name in ("ppo_clip", "gspo", "cispo", "sapo", "dppo_tv")
}
BOUNDED = {
    "token_is": partial(losses.token_is, X),
    "sequence_is": partial(losses.sequence_is, X, MASK),
    "geometric_is": partial(losses.geometric_is, X, MASK),
    "token_icepop": partial(losses.token_icepop, X),
    "sequence_icepop": partial(losses.sequence_icepop, X, MASK),
    "veto": partial(losses.veto, X, MASK),
    "rejection": partial(losses.rejection, X, MASK, statistic="token_k1"),
}
TOKEN_ADVANTAGES = {
    "discounted_returns": partial(losses.discounted_returns, X, MASK),
    "reinforce_pp_advantages": partial(losses.reinforce_pp_advantages, X, MASK),
    "gae": partial(losses.gae, X, X, MASK),
    "whitened_gae": partial(losses.whitened_gae, X, X, MASK),
}
DRIFT = partial(losses.drift_mask, X, X, MASK)
VALUE = partial(losses.clipped_value_loss, X, X, X, MASK)
NEGATIVE, NOT_POSITIVE = (-0.1, NAN), (0.0, -1.0, NAN)
REFUSED = [
    *(
        (TERMS[n], o, NEGATIVE)
        for n in ("ppo_clip", "gspo", "cispo")
        for o in ("clip_low", "clip_high")
    ),
    (TERMS["ppo_clip"], "dual_clip", (1.0, 0.5, -3.0, NAN)),
    *((TERMS["sapo"], o, NOT_POSITIVE) for o in ("tau_positive", "tau_negative")),
    (TERMS["dppo_tv"], "delta", NEGATIVE),
    *((f, "high", NOT_POSITIVE) for f in BOUNDED.values()),
    *((partial(f, high=2.0), "low", (*NEGATIVE, 2.1)) for f in BOUNDED.values()),
    (DRIFT, "max_drift", NEGATIVE),
    *((f, "discount", (-0.1, 1.1, NAN)) for f in TOKEN_ADVANTAGES.values()),
    *((TOKEN_ADVANTAGES[n], "trace", (-0.1, 1.1, NAN)) for n in ("gae", "whitened_gae")),
    (partial(losses.group_advantages, X), "eps", NOT_POSITIVE),
    (partial(losses.whiten, X, MASK), "eps", NOT_POSITIVE),
    (partial(losses.seq_mean_token_sum_norm, MASK), "length", (0, -1)),
    (VALUE, "clip", NOT_POSITIVE),
]


@pytest.mark.parametrize(("function", "name", "values"), REFUSED)
def test_an_option_out_of_range_is_refused(function, name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"{name} must be [^\n]*, got {value!r}"):
            function(**{name: value})


@pytest.mark.parametrize("statistic", ["token_k2", "seq_mean_k3", "seq_max_k3"])
def test_what_is_never_negative_has_no_lower_bound(statistic):
    with pytest.raises(ValueError, match=f"{statistic} is never negative: low must be 0, got 0.1"):
        losses.rejection(X, MASK, statistic=statistic, low=0.1, high=1.0)


@pytest.mark.parametrize(
    "function", [BOUNDED[n] for n in ("token_is", "sequence_is", "geometric_is")]
)
def test_the_edges_of_the_ranges_are_inside(function):
    weights = function(low=2.0, high=2.0).weights_BT
    assert weights.tolist() == [[2.0] * 3] * 2  # a lower bound lifts what is below it
    assert function(high=float("inf")).weights_BT.max() < 5
    TERMS["ppo_clip"](clip_low=0.0, clip_high=0.0, dual_clip=float("inf"))


def test_text_is_no_number_and_no_choice():
    with pytest.raises(ValueError, match="high must be above 0, got '2'. Try high=1.0."):
        check_option("high", "2", POSITIVE)
    with pytest.raises(ValueError, match="scale_by_std must be True or False, got 'no'"):
        inspect.unwrap(losses.group_advantages)(X, scale_by_std="no")  # beneath the types


def test_a_bound_below_every_ratio_is_refused():
    """Ratios are clamped, so the bound would drop nothing."""
    mask = jnp.ones((1, 2), bool)
    log_ratio = jnp.full((1, 2), -30.0)
    k1 = partial(losses.rejection, log_ratio, mask, statistic="token_k1", high=2.0)
    for correction in (partial(losses.veto, log_ratio, mask), k1):
        with pytest.raises(ValueError, match="low must be 0 or above 2.1e-09"):
            correction(low=1e-9)
        assert not correction(low=1e-8).keep_BT.any()
