# SPDX-License-Identifier: Apache-2.0
"""Signatures of token log-probs, and of their two passes over a slice of the vocabulary.

Next: reference.py.
"""

from typing import Protocol

from jaxtyping import Array, Float, Int

Hidden = Float[Array, "M D"]
Head = Float[Array, "D V"]
Targets = Int[Array, " M"]
Scalar = Float[Array, ""]
PerToken = Float[Array, " M"]
Result = tuple[PerToken, PerToken]  # logp and entropy
Statistics = tuple[PerToken, PerToken, PerToken]  # the target's logit, lse and entropy
Gradients = tuple[Hidden, Head]  # the first in float32


class TokenLogprobs(Protocol):
    """(logp, entropy) as `token_logprobs` documents them."""

    def __call__(
        self,
        hidden_MD: Hidden,
        w_head_DV: Head,
        targets_M: Targets,
        temperature: Scalar,
        vocab_size: int,
    ) -> Result: ...


class TokenStatistics(Protocol):
    """The results of `token_statistics`; targets outside the slice are −1."""

    def __call__(
        self,
        hidden_MD: Hidden,
        w_head_DV: Head,
        targets_M: Targets,
        temperature: Scalar,
        vocab_size: int,
    ) -> Statistics: ...


class TokenGradients(Protocol):
    """The results of `token_gradients`; targets outside the slice are −1."""

    def __call__(
        self,
        hidden_MD: Hidden,
        w_head_DV: Head,
        targets_M: Targets,
        temperature: Scalar,
        lse_M: PerToken,
        entropy_M: PerToken,
        dlogp_M: PerToken,
        dentropy_M: PerToken,
        vocab_size: int,
        dhidden_MD: Hidden | None,
    ) -> Gradients: ...
