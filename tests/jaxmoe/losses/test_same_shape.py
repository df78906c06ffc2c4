# SPDX-License-Identifier: Apache-2.0
"""Arrays that broadcast to a number that means nothing are refused by every loss."""

import jax
import jax.numpy as jnp
import pytest

from jaxmoe import losses
from jaxmoe.config.function_specs import array_parameters
from jaxmoe.losses.aggregation import require_same_shape
from jaxmoe.rl.algorithm import CHOICES

B, T = 3, 5
X, MASK = jnp.full((B, T), -1.0), jnp.ones((B, T), bool)
OBJECTIVES = CHOICES["objective"]
ROUTING = {
    "router_logits_BTLE": jnp.zeros((B, T, 2, 4)),
    "old_router_logits_BTLE": jnp.zeros((B, T, 2, 4)),
    "old_experts_BTLA": jnp.zeros((B, T, 2, 1), jnp.int32),
    "experts_E": jnp.arange(4),
    "experts_BTLA": jnp.zeros((B, T, 2, 1), jnp.int32),
    "old_switched_BT": MASK,
}
BAD_SHAPES = [jnp.ones(T), jnp.ones((B, 1)), jnp.ones((1, T)), jnp.ones(())]


@pytest.fixture(autouse=True)
def without_the_tests_own_type_checks(monkeypatch):
    # as users run: jaxtyping checks annotations in tests alone
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.parametrize("misshaped", BAD_SHAPES, ids=lambda x: str(x.shape))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_refuse_advantages_of_another_shape(name, misshaped):
    objective = getattr(losses, name)
    logps = (X,) if name == "reinforce" else (X, X)
    routing = {n: x for n, x in ROUTING.items() if n in array_parameters(objective)}
    assert objective(*logps, X, MASK, **routing).shape == (B, T)
    with pytest.raises(ValueError, match=r"advantages_BT must have the shape \(3, 5\)"):
        objective(*logps, misshaped, MASK, **routing)


@pytest.mark.parametrize("place", range(4))
def test_grpo_loss_refuses_any_array_of_another_shape(place):
    arrays = [X, X, X, MASK]
    arrays[place] = arrays[place][0]
    with pytest.raises(ValueError, match="must have the shape"):
        losses.grpo_loss(*arrays)
    loss, _ = jax.jit(losses.grpo_loss)(X, X, X, MASK)
    assert float(loss) == 1.0


@pytest.mark.parametrize(
    "function, arrays",
    [
        (losses.kl_k1, (X, X)),
        (losses.kl_k2, (X, X)),
        (losses.kl_k3, (X, X)),
        (losses.kl_k3_importance, (X, X, X)),
        (losses.kl_k3_with_k2_gradient, (X, X)),
        (losses.masked_mean, (X, MASK)),
        (losses.masked_sum, (X, MASK)),
        (losses.clipped_value_loss, (X, X, X, MASK)),
        (losses.mismatch_metrics, (X, X, MASK)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_losses_refuse_each_array_of_another_shape(function, arrays):
    function(*arrays)
    for place in range(len(arrays)):
        misshaped = [x[0] if i == place else x for i, x in enumerate(arrays)]
        with pytest.raises(ValueError, match="must have the shape"):
            function(*misshaped)


def test_groups_of_one_are_refused():
    for function in (losses.group_advantages, losses.rloo_advantages):
        with pytest.raises(ValueError, match="at least 2 samples, got 1"):
            function(jnp.ones((4, 1)))


def test_the_message_names_both_arrays_and_the_fix():
    with pytest.raises(
        ValueError, match=r"a_BT .* \(3, 5\) of mask_BT, got \(3,\).*a_B\[:, None\]"
    ):
        require_same_shape(mask_BT=MASK, a_BT=jnp.ones(3))
