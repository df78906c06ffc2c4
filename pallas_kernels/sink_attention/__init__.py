# SPDX-License-Identifier: Apache-2.0
"""Attention with one learned sink per head. The public functions are in api.py."""

from pallas_kernels.sink_attention.api import sink_attention, sink_attention_backward

__all__ = ["sink_attention", "sink_attention_backward"]
