# SPDX-License-Identifier: Apache-2.0
"""Log-probs of one row, by numbers, and their ratios."""

import jax.numpy as jnp

from jaxmoe.losses.ratios import log_ratios

OLD, ROLLOUT = (-1.0, -1.5, -0.5), (-1.5, -1.0, -1.5)  # log ρ = 0.5, -0.5, 1


def row(*values):
    return jnp.asarray([values], jnp.float32)


def true_mask(x):
    return jnp.ones(x.shape, bool)


def ratios(old, rollout, mask=None):
    """log ρ and the mask of one row."""
    old, rollout = row(*old), row(*rollout)
    mask = true_mask(old) if mask is None else jnp.asarray([mask], bool)
    return log_ratios(old, rollout, mask), mask
