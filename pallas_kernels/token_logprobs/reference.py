# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens as one formula, so that `xla.py` has something to answer to.

Holds all [M, V] logits. Next: `xla.py`, which never does.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.token_logprobs.signature import Head, Hidden, Result, Targets, Temperature


def reference(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets,
    temperature: Temperature | float = 1.0, vocab_size: int | None = None,
) -> Result:  # fmt: skip
    """Log-probability of each target and entropy of its distribution.

    z = hidden @ w_head / temperature;  logp = z[target] − lse(z);  H = −Σ p log p

    Returns: logp and entropy in nats, float32.
    Numerics: everything in float32.
    """
    f32 = jnp.float32
    logits_MV = jnp.dot(
        hidden_MD.astype(f32),
        w_head_DV[:, :vocab_size].astype(f32),
        precision=jax.lax.Precision.HIGHEST,
    )
    scale = jax.lax.stop_gradient(jnp.asarray(temperature, f32))
    logp_MV = jax.nn.log_softmax(logits_MV / scale, axis=-1)
    logp_M = jnp.take_along_axis(logp_MV, targets_M.astype(jnp.int32)[:, None], axis=1)[:, 0]
    logp_M -= jax.lax.stop_gradient(jnp.maximum(logp_M, 0.0))  # at most 0, and the same gradient
    return logp_M, -jnp.sum(jnp.exp(logp_MV) * logp_MV, axis=1)


def unsupported(*_arrays) -> str | None:
    """Say why these shapes cannot be computed; None when they can."""
    return None
