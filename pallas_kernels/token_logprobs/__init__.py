# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropies of target tokens, without storing all logits. Next: `api.py`."""

from pallas_kernels.token_logprobs.api import token_logprobs
from pallas_kernels.token_logprobs.divergence import (
    divergence_gradients,
    divergence_statistics,
    finish_divergences,
    merge_divergence_statistics,
    vocabulary_divergences,
)
from pallas_kernels.token_logprobs.listed import listed_logits
from pallas_kernels.token_logprobs.slices import (
    merge_statistics,
    token_gradients,
    token_statistics,
)

__all__ = [
    "divergence_gradients",
    "divergence_statistics",
    "finish_divergences",
    "listed_logits",
    "merge_divergence_statistics",
    "merge_statistics",
    "token_gradients",
    "token_logprobs",
    "token_statistics",
    "vocabulary_divergences",
]
