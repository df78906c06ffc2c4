# SPDX-License-Identifier: Apache-2.0
"""Attention with one learned sink per head. The public function is in api.py."""

from pallas_kernels.sink_attention.api import sink_attention

__all__ = ["sink_attention"]
