# SPDX-License-Identifier: Apache-2.0
"""Attention of a few new queries against a cache. The public functions are in api.py."""

from pallas_kernels.decode_attention.api import (
    decode_attention,
    decode_attention_in_stack,
)
from pallas_kernels.decode_attention.pages import MAX_QUERIES

__all__ = [
    "MAX_QUERIES",
    "decode_attention",
    "decode_attention_in_stack",
]
