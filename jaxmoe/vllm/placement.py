# SPDX-License-Identifier: Apache-2.0
"""Which GPUs each of several servers gets, and how much of their memory.

Left alone every vLLM takes the first GPUs it sees and nine tenths of their memory: a second server,
or a trainer that is there already, leaves it none. Next: jaxmoe/vllm/server.py starts them.
"""

import argparse
import math
import os
import shlex
import subprocess
from dataclasses import dataclass

from jaxmoe.config import ConfigError

VLLM_SHARE = 0.9  # of a GPU that a vLLM takes where it is alone
TRAINER_SHARE = 0.75  # of a GPU that XLA takes where no variable says otherwise
SPARE = 0.05  # for contexts of CUDA and its libraries
_FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclass(frozen=True)
class Placement:
    """Of one server: GPUs as CUDA_VISIBLE_DEVICES names them, none: as vLLM finds them."""

    gpus: tuple[str, ...] = ()
    share: float | None = None  # of each GPU's memory; None: vLLM's own
    alone: bool = True  # no other server is on these GPUs

    def environment(self) -> dict[str, str]:
        """The GPUs; where nobody named any, in nvidia-smi's order, which is not CUDA's default."""
        if not self.gpus:
            return {}
        named = "CUDA_VISIBLE_DEVICES" in os.environ
        order = {} if named else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return order | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}

    def options(self) -> dict[str, str]:
        return {} if self.share is None else {"gpu_memory_utilization": f"{self.share:.2f}"}


def placements(gpus: list[str], servers: int, each: int, trainer: float) -> list[Placement]:
    """`each` GPUs for every server, other ones as long as there are some; then they share.

    `trainer`: the part of every GPU's memory that this process takes, 0 where it takes none.
    Raises ConfigError where there are too few GPUs, or too little is left of them.
    """
    if not gpus:
        return [Placement()] * servers
    groups = [tuple(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)]
    if not groups:
        raise ConfigError(
            f"each server needs {each} GPUs by --tensor-parallel-size and --pipeline-parallel-size "
            f"of rollout.vllm.args, and {len(gpus)} can be seen ({', '.join(gpus)}). "
            "Try --set rollout.vllm.args='--tensor-parallel-size 1'."
        )
    made = []
    for n in range(servers):
        beside = len(range(n % len(groups), servers, len(groups)))  # on the same GPUs, with it
        room = min(VLLM_SHARE, 1 - trainer - SPARE) / beside
        share = math.floor(100 * room + 1e-6) / 100
        if share < SPARE:
            raise ConfigError(
                f"{beside} vLLM of rollout.vllm.launch={servers} share a GPU"
                f"{f' with {trainer:g} of it for the trainer' if trainer else ''}, which leaves "
                f"each {max(0.0, share):g} of its memory. Try --set rollout.vllm.launch="
                f"{len(groups)}, or {_FRACTIONS[0]}=0.4 before the command."
            )
        shared = beside > 1 or trainer > 0
        made.append(Placement(groups[n % len(groups)], share if shared else None, beside == 1))
    return made


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names; where it is not set, the numbers of all NVIDIA GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:end]  # CUDA sees nothing behind an entry that is none
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(lines))] if listed.returncode == 0 else []


def gpus_each(args: str) -> int:
    """The GPUs of one server with these options of vLLM's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for short, name in (("-tp", "tensor"), ("-pp", "pipeline")):
        flags = short, f"--{name}-parallel-size", f"--{name}_parallel_size"
        parser.add_argument(*flags, type=int, default=1, dest=name)
    try:
        found, _ = parser.parse_known_args(shlex.split(args))
    except argparse.ArgumentError:
        return 1  # vLLM says what is wrong with it
    return max(1, found.tensor * found.pipeline)


def trainer_share(on_gpu: bool) -> float:
    """The part of each GPU's memory that XLA takes for this process, by the variables it reads."""
    if not on_gpu:
        return 0.0
    given = next((os.environ[name] for name in _FRACTIONS if os.environ.get(name)), "")
    try:
        return float(given or TRAINER_SHARE)
    except ValueError:
        return TRAINER_SHARE
