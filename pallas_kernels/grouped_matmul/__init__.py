# SPDX-License-Identifier: Apache-2.0
"""Matmul of sorted rows, each group with its own matrix: the experts of an MoE. Next: `api.py`."""

from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.low_rank import LowRank
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

__all__ = ["LowRank", "Mxfp4", "grouped_matmul", "grouped_swiglu"]
