# SPDX-License-Identifier: Apache-2.0
"""Advantages from rewards. Next: jaxmoe/losses/policy.py."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def group_advantages(
    rewards_PR: Float[Array, "P R"], *, scale_by_std: bool = True, eps: float = 1e-6
) -> Float[Array, "P R"]:
    """How much better than its group each sample did.

    A = r − mean_group(r),   or that over (std_group(r) + ε)

    A group whose rewards are all equal gets exactly 0. The deviation divides by R − 1.
    Numerics: float32.
    Source: arXiv:2402.03300 §4.1.2; without the deviation: Dr. GRPO, arXiv:2503.20783 §3.
    """
    rewards_PR = rewards_PR.astype(jnp.float32)
    centred_PR = rewards_PR - jnp.mean(rewards_PR, axis=1, keepdims=True)
    uniform_P1 = jnp.all(rewards_PR == rewards_PR[:, :1], axis=1, keepdims=True)
    centred_PR = jnp.where(uniform_P1, 0.0, centred_PR)
    if not scale_by_std or rewards_PR.shape[1] == 1:
        return centred_PR
    variance_P1 = jnp.sum(centred_PR**2, axis=1, keepdims=True) / (rewards_PR.shape[1] - 1)
    return centred_PR / (jnp.sqrt(variance_P1) + eps)
