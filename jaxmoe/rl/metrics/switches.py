# SPDX-License-Identifier: Apache-2.0
"""Switches: tokens and layers for which two forwards select different sets of experts.

Experts that the engine did not record (UNKNOWN_EXPERT) are never counted as switched.
Next: jaxmoe/rl/loss.py gives the switched tokens to the functions of the loss.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from jaxmoe.batches.batch import Batch
from jaxmoe.losses.routed_ratios import move_to_next_token
from jaxmoe.rl.algorithm import Algorithm


def sort_expert_sets(experts_BTLA: Integer[Array, "B T L A"]) -> Integer[Array, "B T L A"]:
    """Return the experts of each token in ascending order, so that equal sets are equal."""
    return jnp.sort(jnp.asarray(experts_BTLA).astype(jnp.int32), axis=-1)


def compare_expert_sets(
    sorted_BTLA: Integer[Array, "B T L A"], other_sorted_BTLA: Integer[Array, "B T L A"]
) -> Bool[Array, "B T L"]:
    """Return where the sets of sorted experts differ."""
    return jnp.any(sorted_BTLA != other_sorted_BTLA, axis=-1)


def move_switches(switched_BTL: Bool[Array, "B T L"]) -> Bool[Array, "B T"]:
    """Return True at each token whose predicting position t − 1 has a switch in any layer."""
    return move_to_next_token(jnp.any(switched_BTL, axis=-1))


def find_switches_of_loss(
    a: Algorithm, batch: Batch, out: Mapping[str, Array]
) -> dict[str, Bool[Array, "B T"] | None]:
    """Return switched_BT and old_switched_BT, if a function of the loss takes them.

    The experts of this forward, in its results `out`, are compared with the engine's and with those
    before the first update. None if one of them is not recorded.
    """
    takes_late = not a.corrects_before_updates and a.corrects_switches
    compared = {"switched_BT": batch.routed_experts_BTLA, "old_switched_BT": batch.old_experts_BTLA}
    # Computed only if it is taken, so that a step without such a function is compiled as before.
    return {
        name: find_switched_tokens(out.get("experts_BTLA"), experts)
        for name, experts in compared.items()
        if a.takes_array(name) or (takes_late and name == "switched_BT")
    }


def find_switched_tokens(
    experts_BTLA: Integer[Array, "B T L A"] | None,
    other_experts_BTLA: Integer[Array, "B T L A"] | None,
) -> Bool[Array, "B T"] | None:
    """Return True at each token whose predicting position t − 1 has a switch in any layer.

    None if the experts of a forward are not recorded.
    """
    if experts_BTLA is None or other_experts_BTLA is None:
        return None
    sorted_BTLA, compared_BTLA = map(sort_expert_sets, (experts_BTLA, other_experts_BTLA))
    # After sorting, a negative index of an unknown expert comes first. Only the engine's can be.
    return move_switches(
        compare_expert_sets(sorted_BTLA, compared_BTLA) & (compared_BTLA[..., 0] >= 0)
    )


def engine_read_mask(batch: Batch) -> Bool[Array, "B T"]:
    """True at the tokens that the engine's layers read: all but the last of each context."""
    segments_BT = jnp.asarray(batch.segment_ids_BT)
    is_followed_BT = (segments_BT[:, 1:] == segments_BT[:, :-1]) & (segments_BT[:, 1:] > 0)
    return jnp.pad(is_followed_BT, ((0, 0), (0, 1)))
