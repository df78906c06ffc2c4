# SPDX-License-Identifier: Apache-2.0
"""Decoding in plain XLA is sink attention's blocks. Next: pallas_gpu.py or pallas_tpu.py."""

from pallas_kernels.sink_attention.xla import sink_attention_xla

decode_attention_xla = sink_attention_xla
