# SPDX-License-Identifier: Apache-2.0
"""The campaign at toy sizes on a CPU, with stages that hang, die, fail and fill the memory.

    JAX_PLATFORMS=cpu python -m benchmarks.on_device --rehearse --out DIR --minutes 4 --together 2

Its exit status is 0 if every stage ended as expected: the broken ones by what breaks them.
"""

import os
import signal
import sys
import time
from importlib.metadata import version
from typing import Any

from benchmarks.on_device.campaign import Stage
from benchmarks.on_device.stage import report

HERE = "benchmarks.on_device"
FAULTS = f"{HERE}.rehearsal"
# Compiling is most of the time, so XLA does it as in tests/conftest.py. The flag of GPUs tells the
# stages that compiling does not use the device, as it does in a campaign.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_multi_thread_eigen=false --xla_gpu_autotune_level=0"
    + (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        " --xla_cpu_use_xnnpack=false"
    )
    * version("jaxlib").startswith("0.10.")
)
SMALL_RUN = (
    "warmup.steps=0",
    "steps=1",
    "data.train_rows=8",
    "data.held_out_rows=2",
    "rollout.sequences_per_step=4",
    "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=2",
)


def toy(name: str, module: str, *arguments: str, phase: int = 0) -> Stage:
    command = (f"{HERE}.{module}", *arguments)
    return Stage(name, command, 300, phase=phase, environment=(("XLA_FLAGS", FLAGS),))


def broken(name: str, limit_s: float, expected: str, memory_gb: float = 40.0) -> Stage:
    return Stage(name, (FAULTS, name), limit_s, memory_gb=memory_gb, expected=expected)


REHEARSAL = (
    toy("smoke", "smoke"),
    toy("step", "train_step", "--model", "tiny", "--tokens", "48", "--sequences", "2", "--profile"),
    broken("hang", 4, "timed out"),
    broken("die", 60, "failed"),
    broken("fail", 60, "failed"),
    broken("fill", 60, "out of memory", memory_gb=0.4),
    toy(
        "decode",
        "decode",
        "--model",
        "tiny",
        "--rows",
        "2",
        "--keys",
        "64",
        "--tokens",
        "4",
        "--rounds",
        "1",
    ),
    toy(
        "pair",
        "kernel_pair",
        "grouped_matmul",
        "--case",
        "tiny_decode",
        "--impl",
        "xla",
        "--vs",
        f"{FAULTS}:ragged_dot",
        "--rounds",
        "1",
    ),
    toy(
        "run",
        "whole_run",
        "--config",
        "tiny.py",
        *(word for setting in SMALL_RUN for word in ("--set", setting)),
        phase=1,
    ),
    toy("cases", "cases", "--platform", "cpu", "--workers", "1", phase=1),
)


def ragged_dot(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """A peer that a CPU runs quickly: jax.lax.ragged_dot, forward only."""
    from benchmarks import kernel_peers

    return {"forward": kernel_peers.ragged_dot(case, inputs, cotangents)["forward"]}


def main(fault: str) -> None:
    """Hang, die, fail or fill the memory, as a stage may; or compile, which takes no time."""
    if fault == "compile":
        print("compiled for", sys.argv[-1], flush=True)
        return
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "fail":
        report(step=1)
        sys.exit("it must not be so")
    blocks = []
    while True:
        if fault == "fill":
            blocks.append(bytearray(os.urandom(2**20)) * 32)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
