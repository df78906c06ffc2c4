# SPDX-License-Identifier: Apache-2.0
"""The one signature of token log-probs, which every implementation shares. Next: reference.py."""

from typing import Protocol

from jaxtyping import Array, Float, Int

Hidden = Float[Array, "M D"]
Head = Float[Array, "D V"]
Targets = Int[Array, " M"]
Temperature = Float[Array, ""]
Result = tuple[Float[Array, " M"], Float[Array, " M"]]  # logp and entropy


class TokenLogprobs(Protocol):
    """What `token_logprobs` documents."""

    def __call__(
        self,
        hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
        vocab_size: int,
    ) -> Result: ...  # fmt: skip
