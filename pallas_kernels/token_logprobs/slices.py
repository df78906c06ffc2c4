# SPDX-License-Identifier: Apache-2.0
"""Token log-probs of a head in slices: what one slice says, and how that is put together.

A softmax over a vocabulary follows from three numbers of each of its slices. Its gradient through
a slice needs no other slice once lse and entropy of the whole are known:

    parts = [token_statistics(hidden, slice, …) for each slice]
    logp, entropy, lse = merge_statistics(*stacked parts)
    dhidden, dw = token_gradients(hidden, slice, …, lse, entropy, dlogp, dentropy, dhidden) of each

Both are the two passes of token_logprobs, in the same implementations. Next: `reference.py`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Impl, Implementation, lazily, pick
from pallas_kernels.token_logprobs import reference, streamed, xla
from pallas_kernels.token_logprobs.api import checked
from pallas_kernels.token_logprobs.signature import TokenGradients, TokenStatistics


def _mosaic(what: str) -> dict[str, Implementation[Any]]:
    """The kernels of `mosaic`, one pass each."""
    return {
        f"mosaic_{chip}": lazily(
            f"pallas_kernels.token_logprobs.pallas_{chip}", f"mosaic_{chip}_{what}", (chip,),
            proven=False,
        )
        for chip in ("gpu", "tpu")
    }  # fmt: skip


STATISTICS: dict[str, Implementation[TokenStatistics]] = _mosaic("statistics") | {
    "xla": Implementation(xla.xla_statistics, xla.unsupported),
    "reference": Implementation(reference.reference_statistics, reference.unsupported),
}
GRADIENTS: dict[str, Implementation[TokenGradients]] = _mosaic("gradients") | {
    "xla": Implementation(xla.xla_gradients, xla.unsupported),
    "reference": Implementation(reference.reference_gradients, reference.unsupported),
}


def token_statistics(
    hidden_MD: Float[Array, "M D"],
    w_slice_DV: Float[Array, "D V"],
    targets_M: Int[Array, " M"],
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """What the log-probs over a whole vocabulary need of one slice of it: (chosen, lse, entropy).

    z = hidden @ w_slice[:, :vocab_size] / temperature;  lse = log Σ e^z;  p = e^(z − lse);
    chosen = z[target], 0 where the slice does not have the target;  entropy = −Σ p log p

    Args:
        targets_M: columns of the slice; another number, a negative one too, is of another slice.
        temperature: above 0; may be traced.
        vocab_size: the columns that are words, at least one: a slice without words is left out.

    Returns: float32. To be differentiated by `token_gradients`, not by JAX.
    Numerics: as of `token_logprobs`.
    Raises: ValueError when the shapes do not fit.
    """
    hidden_MD, w_slice_DV, targets_M, vocab_size = checked(
        hidden_MD, w_slice_DV, targets_M, temperature, vocab_size
    )
    chosen = pick(impl, STATISTICS, hidden_MD, w_slice_DV)
    return chosen(
        hidden_MD, w_slice_DV, _here(targets_M, vocab_size),
        jnp.asarray(temperature, jnp.float32), vocab_size,
    )  # fmt: skip


def merge_statistics(
    chosen_nM: Float[Array, "n M"], lse_nM: Float[Array, "n M"], entropy_nM: Float[Array, "n M"]
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """Log-prob, entropy and lse over a vocabulary, from the statistics of its n slices.

    lse = log Σ e^lse_n;  logp = Σ chosen_n − lse;
    P_n = e^(lse_n − lse);  H = Σ P_n (H_n − log P_n)

    Numerics: float32; logp is at most 0. Slices bring their entropy and not their mean logit, as a
        difference of lse and mean would lose what large logits leave of it.
    """
    return streamed.merge(lse_nM, jnp.ones_like(lse_nM), -entropy_nM, chosen_nM, axis=0)


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
    """Gradients of `merge_statistics` through one slice: its own, and a share of hidden's.

    dz = dlogp (1[target] − p) − dentropy p (log p + H);  dhidden = dz @ w_sliceᵀ / temperature;
    dw_slice = hiddenᵀ @ dz / temperature

    Args:
        lse_M, entropy_M: of the whole vocabulary, as merged.
        dlogp_M, dentropy_M: cotangents of logp and entropy.
        dhidden_MD: float32, the sum of what other slices gave, to which this one's is added.
        targets_M, temperature, vocab_size: as of `token_statistics`.

    Returns: dhidden in float32; dw_slice in the slice's dtype, 0 past vocab_size.
    Raises: ValueError when the shapes do not fit.
    """
    hidden_MD, w_slice_DV, targets_M, vocab_size = checked(
        hidden_MD, w_slice_DV, targets_M, temperature, vocab_size
    )
    chosen = pick(impl, GRADIENTS, hidden_MD, w_slice_DV)
    return chosen(
        hidden_MD, w_slice_DV, _here(targets_M, vocab_size),
        jnp.asarray(temperature, jnp.float32), lse_M, entropy_M, dlogp_M, dentropy_M, vocab_size,
        dhidden_MD,
    )  # fmt: skip


def _here(targets_M: Int[Array, " M"], vocab_size: int) -> Int[Array, " M"]:
    """−1, which no column is, for targets of other slices: kernels may have columns of padding."""
    return jnp.where((targets_M >= 0) & (targets_M < vocab_size), targets_M, -1)
