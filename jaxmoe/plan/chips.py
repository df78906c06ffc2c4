# SPDX-License-Identifier: Apache-2.0
"""Memory and throughput of each chip by its vendor. Next: jaxmoe/plan/roofline.py."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One device as JAX counts devices, which may be half of a chip. Bandwidths are bytes/s."""

    memory: int  # bytes
    flops: float  # dense bfloat16, per second
    memory_bandwidth: float
    links: float  # bandwidth to neighbours, the sum of all links
    network: float  # bandwidth to other hosts; 0: its links connect hosts too


GIB = 2**30
GPU_NETWORK = 50e9  # 400 Gb/s a GPU, as NVIDIA's DGX H100 has; a cloud may have less

CHIPS = {
    # docs.cloud.google.com/tpu/docs/v5e, 1600 Gb/s
    "v5e": Chip(16 * GIB, 197e12, 819e9, 200e9, 0.0),
    # docs.cloud.google.com/tpu/docs/v5p, 4800 Gb/s
    "v5p": Chip(95 * GIB, 459e12, 2765e9, 600e9, 0.0),
    # docs.cloud.google.com/tpu/docs/v6e, 3200 Gb/s
    "v6e": Chip(32 * GIB, 918e12, 1600e9, 400e9, 0.0),
    # docs.cloud.google.com/tpu/docs/tpu7x: 192 GiB, 2307 TFLOP/s, 7380 GB/s and 600 GB/s each way
    # a chip, which is two devices
    "tpu7x": Chip(96 * GIB, 1153e12, 3690e9, 300e9, 0.0),
    # NVIDIA's data sheets: dense bfloat16, memory as nvidia-smi tells it, half of NVLink's total
    "a100": Chip(80 * GIB, 312e12, 2039e9, 300e9, GPU_NETWORK),
    "h100": Chip(80 * GIB, 989e12, 3350e9, 450e9, GPU_NETWORK),
    "h200": Chip(140 * GIB, 989e12, 4800e9, 450e9, GPU_NETWORK),
    "b200": Chip(179 * GIB, 2250e12, 8000e9, 900e9, GPU_NETWORK),
}
