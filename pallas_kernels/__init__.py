# SPDX-License-Identifier: Apache-2.0
"""Kernels of a sparse-MoE transformer with attention sinks; imports jax and jaxtyping only.

Each operation is a folder: api.py (the public function), reference.py (the formula in float32),
one file for each implementation, cases.py (named shapes). dispatch.py selects the implementation.
"""

from pallas_kernels.decode_attention import (
    decode_attention,
    decode_attention_in_stack,
)
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.sink_attention import sink_attention, sink_attention_backward
from pallas_kernels.token_logprobs import token_logprobs

__all__ = [
    "decode_attention",
    "decode_attention_in_stack",
    "grouped_matmul",
    "grouped_swiglu",
    "sink_attention",
    "sink_attention_backward",
    "token_logprobs",
]
