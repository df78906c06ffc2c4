# SPDX-License-Identifier: Apache-2.0
"""The reference: sink attention's formula. Next: pages.py, what the kernels read of a cache."""

from pallas_kernels.sink_attention.reference import sink_attention_reference

decode_attention_reference = sink_attention_reference
