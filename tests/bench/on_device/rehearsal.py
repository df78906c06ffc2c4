# SPDX-License-Identifier: Apache-2.0
"""The campaign at toy sizes on a CPU, with stages that hang, die and fill the memory."""

import os
import signal
import sys
import time
from typing import Any

from tests.bench.on_device.campaign import Stage

HERE = "tests.bench.on_device"
FAULTS = f"{HERE}.rehearsal"
TOY_STEP = (f"{HERE}.train_step", "--model", "tiny", "--tokens", "48", "--sequences", "2")
REHEARSAL = (
    Stage("smoke", (f"{HERE}.smoke",), 100),
    Stage("step", (*TOY_STEP, "--profile"), 100),
    Stage("hangs", (FAULTS, "hang"), 4),
    Stage("dies", (FAULTS, "die"), 60),
    Stage("fills_memory", (FAULTS, "fill"), 60, memory_gb=0.4),
    Stage("decode", (f"{HERE}.decode", "--model", "tiny", "--rows", "2", "--keys", "64",
                     "--tokens", "4", "--rounds", "1"), 100),
    Stage("pair", (f"{HERE}.kernel_pair", "grouped_matmul", "--case", "tiny_decode", "--impl",
                   "xla", "--vs", f"{FAULTS}:ragged_dot", "--rounds", "1"), 100),
    Stage("cases", (f"{HERE}.cases", "--platform", "cpu"), 100, phase=1),
    Stage("run", (f"{HERE}.whole_run", "--config", "tiny.py", "--set", "warmup.steps=1", "--set",
                  "steps=1", "--set", "data.train_rows=64", "--set", "data.held_out_rows=8"),
          100, phase=1),
)  # fmt: skip
BROKEN = ("hangs", "dies", "fills_memory")


def ragged_dot(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """A peer that a CPU runs quickly: jax.lax.ragged_dot, forward only."""
    from tests.bench import kernel_peers

    return {"forward": kernel_peers.ragged_dot(case, inputs, cotangents)["forward"]}


def main(fault: str) -> None:
    """Hang, die or fill the memory, as a stage may."""
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    blocks = []
    while True:
        if fault == "fill":
            blocks.append(bytearray(os.urandom(2**20)) * 32)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
