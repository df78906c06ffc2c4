# SPDX-License-Identifier: Apache-2.0
"""Token log-probs of a head in slices: statistics of one slice, and their merge.

A softmax over a vocabulary is determined by three numbers for each slice. Its gradient through a
slice needs no other slice, only lse and entropy over the full vocabulary:

    parts = [token_statistics(hidden, slice, …) for each slice]
    logp, entropy, lse = merge_statistics(*stacked parts)
    dhidden, dw = token_gradients(hidden, slice, …, lse, entropy, dlogp, dentropy, dhidden) of each

These are the two passes of token_logprobs, in the same implementations. Next: `reference.py`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Impl, Implementation, implementations_of, select_implementation
from pallas_kernels.token_logprobs import reference, streamed, xla
from pallas_kernels.token_logprobs.api import check_logprobs_arguments
from pallas_kernels.token_logprobs.signature import TokenGradients, TokenStatistics

_HERE = "pallas_kernels.token_logprobs"
STATISTICS: dict[str, Implementation[TokenStatistics]] = implementations_of(
    _HERE, "token_statistics", xla.token_statistics_xla, reference.token_statistics_reference
)
GRADIENTS: dict[str, Implementation[TokenGradients]] = implementations_of(
    _HERE, "token_gradients", xla.token_gradients_xla, reference.token_gradients_reference
)


def token_statistics(
    hidden_MD: Float[Array, "M D"],
    w_slice_DV: Float[Array, "D V"],
    targets_M: Int[Array, " M"],
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """Statistics of one slice of the vocabulary: (chosen, lse, entropy).

    z = hidden @ w_slice[:, :vocab_size] / temperature;  lse = log Σ e^z;  p = e^(z − lse);
    chosen = z[target], 0 if the target is not in the slice;  entropy = −Σ p log p

    Args:
        targets_M: columns of the slice; any other number, also a negative one, is not in it.
        temperature: above 0; may be traced.
        vocab_size: number of columns that are words, at least 1: omit slices without words.

    Returns: float32. `token_gradients` computes the gradients; JAX does not.
    Numerics: as of `token_logprobs`.
    Raises: ValueError when the shapes do not fit.
    """
    hidden_MD, w_slice_DV, targets_M, vocab_size = check_logprobs_arguments(
        hidden_MD, w_slice_DV, targets_M, temperature, vocab_size
    )
    run = select_implementation(impl, STATISTICS, hidden_MD, w_slice_DV)
    return run(
        hidden_MD,
        w_slice_DV,
        _local_targets(targets_M, vocab_size),
        jnp.asarray(temperature, jnp.float32),
        vocab_size,
    )


def merge_statistics(
    chosen_nM: Float[Array, "n M"], lse_nM: Float[Array, "n M"], entropy_nM: Float[Array, "n M"]
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """Log-prob, entropy and lse over a vocabulary, from the statistics of its n slices.

    lse = log Σ e^lse_n;  logp = Σ chosen_n − lse;
    P_n = e^(lse_n − lse);  H = Σ P_n (H_n − log P_n)

    Numerics: float32; logp is at most 0. Slices pass their entropy, not their mean logit: for large
        logits the difference of lse and mean would cancel.
    """
    return streamed.merge_partials(lse_nM, jnp.ones_like(lse_nM), -entropy_nM, chosen_nM, axis=0)


def token_gradients(
    hidden_MD: Float[Array, "M D"],
    w_slice_DV: Float[Array, "D V"],
    targets_M: Int[Array, " M"],
    lse_M: Float[Array, " M"],
    entropy_M: Float[Array, " M"],
    dlogp_M: Float[Array, " M"],
    dentropy_M: Float[Array, " M"],
    dhidden_MD: Float[Array, "M D"] | None = None,
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, "M D"], Float[Array, "D V"]]:
    """Gradients of `merge_statistics` through one slice: (share of dhidden, dw_slice).

    dz = dlogp (1[target] − p) − dentropy p (log p + H);  dhidden = dz @ w_sliceᵀ / temperature;
    dw_slice = hiddenᵀ @ dz / temperature

    Args:
        lse_M, entropy_M: over the full vocabulary, from `merge_statistics`.
        dlogp_M, dentropy_M: cotangents of logp and entropy.
        dhidden_MD: float32 sum of the shares of other slices, to which this share is added.
        targets_M, temperature, vocab_size: as of `token_statistics`.

    Returns: dhidden in float32; dw_slice in the slice's dtype, 0 past vocab_size.
    Raises: ValueError when the shapes do not fit.
    """
    hidden_MD, w_slice_DV, targets_M, vocab_size = check_logprobs_arguments(
        hidden_MD, w_slice_DV, targets_M, temperature, vocab_size
    )
    run = select_implementation(impl, GRADIENTS, hidden_MD, w_slice_DV)
    return run(
        hidden_MD,
        w_slice_DV,
        _local_targets(targets_M, vocab_size),
        jnp.asarray(temperature, jnp.float32),
        lse_M,
        entropy_M,
        dlogp_M,
        dentropy_M,
        vocab_size,
        dhidden_MD,
    )


def _local_targets(targets_M: Int[Array, " M"], vocab_size: int) -> Int[Array, " M"]:
    """Targets with −1 for those of other slices, as kernels may have padding columns."""
    return jnp.where((targets_M >= 0) & (targets_M < vocab_size), targets_M, -1)
