# SPDX-License-Identifier: Apache-2.0
"""Parts of the attention kernels for Hopper. ../pallas_gpu.py is the kernel that uses them."""
