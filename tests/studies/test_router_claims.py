# SPDX-License-Identifier: Apache-2.0
"""Three claims about RL with top-k routing, each in float64 and with soft routing as the control.

1. No gradient reaches the logit of an expert that was not selected.
2. The policy jumps where the selected experts change.
3. The surrogate of PPO is not a first-order approximation across such a jump.

All answers of a micro model are enumerated, so nothing here is an estimate.
"""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model.moe.router import route_top_k, router_dot
from jaxmoe.model.moe.soft_routing import route_softly, route_straight_through
from studies.float64 import in_float64
from studies.micro_model import (
    Answers,
    MicroSizes,
    answer_logprobs,
    make_micro_params,
    make_rewards,
)

SIZES = MicroSizes(length=3)
ANSWERS = Answers(SIZES.length)
REWARDS_B = make_rewards(1, ANSWERS)
SHAPE_LBTE = (SIZES.n_layers, *ANSWERS.tokens_BT.shape, SIZES.n_experts)
NO_CHANGE = np.zeros(SHAPE_LBTE)


def shifted(router, shift_LBTE):
    """The router with a shift of its logits: by layer, answer, position and expert."""

    def route(h_BTD, layer, *, active, context):
        def product(h, w_DE):
            return router_dot(h, w_DE) + shift_LBTE[context.layer].reshape(*h.shape[:-1], -1)

        return router(h_BTD, layer, active=active, product=product)

    return route


@cache
def programs(router):
    """Log-probs of all answers, and the gradient of their sum, as functions of the shift."""

    params = make_micro_params(1, SIZES)

    def run(shift_LBTE, params):
        tokens = jnp.asarray(ANSWERS.inputs_BT), jnp.asarray(ANSWERS.tokens_BT)
        return answer_logprobs(params, *tokens, SIZES.config, shifted(router, shift_LBTE))

    def total(shift_LBTE, params):
        return jnp.sum(run(shift_LBTE, params)[0])

    def call(function):
        compiled = jax.jit(in_float64(function))

        def in_x64(shift_LBTE):
            with jax.enable_x64(True):
                return jax.tree.map(np.asarray, compiled(shift_LBTE, params))

        return in_x64

    return SimpleNamespace(run=call(run), gradient=call(jax.grad(total)))


def selected_experts():
    """Mask of the selected experts, and the router's logits."""
    logits_BTLE = programs(route_top_k).run(NO_CHANGE)[1]["router_logits_BTLE"]
    logits_LBTE = np.moveaxis(logits_BTLE, 2, 0)
    sorted_LBTE = np.sort(logits_LBTE, axis=-1)[..., ::-1]
    active = SIZES.active
    return logits_LBTE >= sorted_LBTE[..., active - 1 : active], logits_LBTE


@pytest.mark.slow
def test_an_unselected_expert_gets_no_gradient():
    is_selected, _ = selected_experts()
    gradient = programs(route_top_k).gradient(NO_CHANGE)
    assert gradient.dtype == np.float64
    assert np.all(gradient[~is_selected] == 0.0)  # to the bit
    # The others have one: the zeros above are not those of a disconnected program.
    assert np.mean(np.abs(gradient[is_selected]) > 1e-6) > 0.9


def test_soft_routing_matches_central_differences_for_all_experts():
    is_selected, _ = selected_experts()
    soft = programs(route_softly)
    gradient = soft.gradient(NO_CHANGE)
    assert np.mean(np.abs(gradient[~is_selected]) > 1e-6) > 0.9
    step, places = 1e-4, np.argwhere(~is_selected)
    for place in map(tuple, places[np.random.default_rng(0).choice(len(places), 6)]):
        shift = NO_CHANGE.copy()
        shift[place] = step
        difference = (soft.run(shift)[0].sum() - soft.run(-shift)[0].sum()) / (2 * step)
        assert abs(difference - gradient[place]) <= 1e-4 * abs(gradient[place])


def test_a_straight_through_gradient_is_not_the_derivative():
    is_selected, logits = selected_experts()
    straight = programs(route_straight_through)
    gradient = straight.gradient(NO_CHANGE)
    assert np.mean(np.abs(gradient[~is_selected]) > 1e-6) > 0.9
    place = tuple(np.argwhere(~is_selected & (logits < 0))[0])
    shift = NO_CHANGE.copy()
    shift[place] = 1e-4
    # The policy is that of top-k, which does not depend on this logit.
    np.testing.assert_array_equal(straight.run(shift)[0], straight.run(-shift)[0])
    np.testing.assert_allclose(
        straight.run(NO_CHANGE)[0], programs(route_top_k).run(NO_CHANGE)[0], rtol=1e-12
    )


def boundary(position):
    """A shift that puts one token's third expert level with its second, and the direction that
    raises it: in the first layer, at a position of all answers with the first answer's prefix."""
    _, logits_LBTE = selected_experts()
    order = np.argsort(-logits_LBTE[0, 0, position])
    second, third = order[SIZES.active - 1 : SIZES.active + 1]
    margin = logits_LBTE[0, 0, position, second] - logits_LBTE[0, 0, position, third]
    has_prefix = ANSWERS.prefixes_BT[:, position] == ANSWERS.prefixes_BT[0, position]
    direction = NO_CHANGE.copy()
    direction[0, has_prefix, position, third] = 1.0
    return margin * direction, direction


def gap_across(router, step, position=0):
    """Largest change of a log-prob from one side of the boundary to the other."""
    shift, direction = boundary(position)
    run = programs(router).run
    below, above = (run(shift + side * step * direction)[0] for side in (-1, 1))
    return np.abs(above - below).max()


def test_one_sided_limits_differ_across_a_boundary():
    gaps = [gap_across(route_top_k, step) for step in (1e-6, 5e-7, 1e-9)]
    assert min(gaps) > 1e-2
    # The gap is that of the limits: a smaller step leaves it as it is.
    np.testing.assert_allclose(gaps, gaps[-1], rtol=1e-3)


def test_a_soft_policy_has_no_gap():
    gaps = [gap_across(route_softly, step) for step in (1e-3, 5e-4, 2.5e-4)]
    # Proportional to the step, as a differentiable function's: it goes to 0.
    np.testing.assert_allclose(np.divide(gaps[:-1], gaps[1:]), 2.0, rtol=1e-4)


def errors_of_approximations(router, start, step, direction):
    """|J − L| of the surrogate and |J − J0 − step·J'| of the tangent, after a step from `start`."""
    run = programs(router).run
    old_logp_BT, new_logp_BT = run(start)[0], run(start + step * direction)[0]
    old_B, new_B = np.exp(old_logp_BT.sum(1)), np.exp(new_logp_BT.sum(1))
    old_value, new_value = old_B @ REWARDS_B, new_B @ REWARDS_B
    ratios_BT = np.exp(new_logp_BT - old_logp_BT)
    surrogate = old_value + old_B @ ((ratios_BT - 1.0).sum(1) * (REWARDS_B - old_value))
    # The derivative on this side of the boundary, from a step away from it.
    backward = run(start - 1e-5 * direction)[0].sum(1)
    slope = (old_value - np.exp(backward) @ REWARDS_B) / 1e-5
    return abs(new_value - surrogate), abs(new_value - old_value - step * slope)


@pytest.mark.parametrize("router", [route_top_k, route_softly])
def test_the_surrogate_is_first_order_without_switches(router):
    # The logit of a selected expert, since no other has an effect under top-k.
    is_selected, _ = selected_experts()
    direction = NO_CHANGE.copy()
    direction[0, :, 0, np.argmax(is_selected[0, 0, 0])] = 1.0
    steps = (4e-3, 2e-3, 1e-3)
    errors = np.array([errors_of_approximations(router, NO_CHANGE, x, direction) for x in steps])
    assert np.all(errors[:, 0] > 0)
    # |J − L| is quadratic in the step, so that |J − L|/step goes to 0 linearly.
    np.testing.assert_allclose(errors[:-1, 0] / errors[1:, 0], 4.0, rtol=0.05)
    before, after = (
        np.sort(programs(router).run(NO_CHANGE + x * direction)[1]["experts_BTLA"])
        for x in (0.0, steps[0])
    )
    np.testing.assert_array_equal(before, after)


def test_the_surrogate_errs_where_several_tokens_change():
    """The first token's key and value are read by all later tokens, so all ratios jump."""
    shift, direction = boundary(position=0)
    start = shift - 1e-9 * direction
    steps = (1e-3, 1e-4, 1e-5, 1e-6)
    hard = np.array([errors_of_approximations(route_top_k, start, x, direction) for x in steps])
    soft = np.array([errors_of_approximations(route_softly, start, x, direction) for x in steps])
    assert np.all(hard[-1] > 1e-5)
    np.testing.assert_allclose(hard[-1], hard[-2], rtol=1e-2)  # a constant
    assert np.all(soft[-1] < 1e-3 * hard[-1])


def test_the_surrogate_is_exact_for_one_changed_token():
    """No later token reads the last one, so the answer's ratio is one token's ratio.

    The surrogate is then exact at any jump. Its tangent, which a step along the gradient follows,
    is not.
    """
    shift, direction = boundary(position=SIZES.length - 1)
    start = shift - 1e-9 * direction
    steps = (1e-4, 1e-5, 1e-6)
    errors = np.array([errors_of_approximations(route_top_k, start, x, direction) for x in steps])
    assert np.all(errors[:, 0] < 1e-14)
    assert errors[-1, 1] > 1e-5
    np.testing.assert_allclose(errors[-1, 1], errors[-2, 1], rtol=1e-2)


@pytest.mark.parametrize("router", [route_top_k, route_softly])
def test_enumerated_answers_have_total_probability_one(router):
    total = np.exp(programs(router).run(NO_CHANGE)[0].sum(1)).sum()
    assert abs(total - 1.0) < 1e-13


def test_float64_changes_no_more_than_float32_rounding():
    tokens = jnp.asarray(ANSWERS.inputs_BT), jnp.asarray(ANSWERS.tokens_BT)
    narrow, _ = jax.jit(partial(answer_logprobs, cfg=SIZES.config, router=route_top_k))(
        make_micro_params(1, SIZES), *tokens
    )
    assert narrow.dtype == jnp.float32
    wide = programs(route_top_k).run(NO_CHANGE)[0]
    error = np.abs(np.asarray(narrow, np.float64) - wide).max()
    assert 0 < error < 1e-5
