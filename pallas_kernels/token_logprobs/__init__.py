# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropies of chosen tokens, never holding all the logits. Next: `api.py`."""

from pallas_kernels.token_logprobs.api import token_logprobs

__all__ = ["token_logprobs"]
