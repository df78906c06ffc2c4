# SPDX-License-Identifier: Apache-2.0
"""The first stage: what the machine has, and its own limits: a large copy and large products.

The product is timed as XLA chooses its algorithm by default, and with two settings that choose none
by measuring, since choosing costs minutes of compiling in a large program.
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.on_device.stage import device_alone, report
from pallas_kernels.bench.measure import time_run

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "torch",
    "transformers",
    "triton",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "peft",
)
FLAGS = {
    "tuned": "",
    "untuned": "--xla_gpu_autotune_level=0",
    "cublas untuned": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,memory.total"


def query_card() -> str:
    """What nvidia-smi says of the card, in the order of QUERY; "" without it."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def installed_versions() -> dict[str, str]:
    """Versions of the packages that figures depend on; missing ones are left out."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def measure_limits(width: int, elements: int) -> dict[str, Any]:
    """TFLOP/s of a square product of random bfloat16, and GB/s of a copy, read and written."""
    a, b = (
        jax.random.normal(jax.random.key(i), (width, width)).astype(jnp.bfloat16) for i in (0, 1)
    )
    matmul = jax.jit(jnp.matmul)
    seconds = statistics.median(time_run(lambda: matmul(a, b)) for _ in range(10))
    x = jax.random.normal(jax.random.key(2), (elements,))
    copy = jax.jit(lambda x: x + 1.0)
    copy_s = statistics.median(time_run(lambda: copy(x)) for _ in range(10))
    return {
        "product_tflops": 2e-12 * width**3 / seconds,
        "width": width,
        "copy_gbs": 8e-9 * elements / copy_s,
    }


def main() -> None:
    if "--limits" in sys.argv:
        width, elements = (512, 2**20) if jax.default_backend() == "cpu" else (8192, 2**29)
        print(json.dumps(measure_limits(width, elements)))
        return
    device = jax.devices()[0]
    report(
        platform=device.platform,
        kind=device.device_kind,
        versions=installed_versions(),
        cores=os.cpu_count(),
        card=query_card(),
    )
    with device_alone():
        for name, flags in FLAGS.items():
            # A process each: XLA reads its flags once.
            flags = flags if device.platform == "gpu" else ""
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.on_device.smoke", "--limits"],
                capture_output=True,
                text=True,
                env={**os.environ, "XLA_FLAGS": flags},
            )
            if done.returncode:
                print(done.stderr[-500:])
                sys.exit(f"the product ended with status {done.returncode}")
            report(
                setting=name,
                flags=flags,
                **json.loads(done.stdout.splitlines()[-1]),
                card=query_card(),
            )


if __name__ == "__main__":
    main()
