# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul's kernels for Hopper. Next: pallas_gpu_tiles.py, the code that they share."""
