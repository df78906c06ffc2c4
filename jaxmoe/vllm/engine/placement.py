# SPDX-License-Identifier: Apache-2.0
"""The GPUs of each of several servers, and the fraction of their memory that each may use.

By default every vLLM uses the first GPUs it sees and nine tenths of their memory: a second server,
or a trainer that is already running, would find none. Next: jaxmoe/vllm/engine/server.py starts
them.
"""

import argparse
import math
import os
import shlex
import subprocess
from dataclasses import dataclass

from jaxmoe.config import ConfigError

VLLM_MEMORY_FRACTION = 0.9  # of a GPU, if a vLLM has it to itself
TRAINER_MEMORY_FRACTION = 0.75  # of a GPU, XLA's default
SPARE_MEMORY_FRACTION = 0.05  # for contexts of CUDA and its libraries
_FRACTION_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclass(frozen=True)
class Placement:
    """The GPUs of one server, as CUDA_VISIBLE_DEVICES names them; none: vLLM's default."""

    gpus: tuple[str, ...] = ()
    memory_fraction: float | None = None  # of each GPU's memory; None: vLLM's default
    exclusive: bool = True  # no other server is on these GPUs

    def gpu_environment(self) -> dict[str, str]:
        """Return variables that select the GPUs, by default in nvidia-smi's order, not CUDA's."""
        if not self.gpus:
            return {}
        user_chose = "CUDA_VISIBLE_DEVICES" in os.environ
        order = {} if user_chose else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return order | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}

    def vllm_options(self) -> dict[str, str]:
        """Return vLLM's option for the memory fraction."""
        fraction = self.memory_fraction
        return {} if fraction is None else {"gpu_memory_utilization": f"{fraction:.2f}"}


def assign_gpus(
    gpus: list[str], servers: int, gpus_per_server: int, trainer_fraction: float
) -> list[Placement]:
    """Assign `gpus_per_server` GPUs to every server, distinct ones while there are enough.

    `trainer_fraction`: the part of every GPU's memory that this process uses, 0 if none. Raises
    ConfigError if there are too few GPUs, or too little of their memory is left.
    """
    if not gpus:
        return [Placement()] * servers
    groups = [
        tuple(gpus[i : i + gpus_per_server])
        for i in range(0, len(gpus) - gpus_per_server + 1, gpus_per_server)
    ]
    if not groups:
        raise ConfigError(
            f"each server needs {gpus_per_server} GPUs by --tensor-parallel-size and "
            f"--pipeline-parallel-size of rollout.vllm.args; {len(gpus)} are visible "
            f"({', '.join(gpus)}). "
            "Try --set rollout.vllm.args='--tensor-parallel-size 1'."
        )
    assigned = []
    for n in range(servers):
        servers_per_gpu = len(range(n % len(groups), servers, len(groups)))  # including this one
        room = min(VLLM_MEMORY_FRACTION, 1 - trainer_fraction - SPARE_MEMORY_FRACTION)
        # The option has two decimals, and rounding up could exceed the memory. The small number
        # keeps a product such as 28.999999 at 29.
        fraction = math.floor(100 * (room / servers_per_gpu) + 1e-6) / 100
        if fraction < SPARE_MEMORY_FRACTION:
            raise ConfigError(
                f"{servers_per_gpu} vLLM of rollout.vllm.launch={servers} share a GPU"
                f"{f' with {trainer_fraction:g} of it for the trainer' if trainer_fraction else ''}"
                f", which leaves each {max(0.0, fraction):g} of its memory. Try --set "
                f"rollout.vllm.launch={len(groups)}, or set {_FRACTION_VARIABLES[0]}=0.4."
            )
        shared = servers_per_gpu > 1 or trainer_fraction > 0
        assigned.append(
            Placement(groups[n % len(groups)], fraction if shared else None, servers_per_gpu == 1)
        )
    return assigned


def list_visible_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; if it is not set, the numbers of all NVIDIA GPUs."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        names = [name.strip() for name in variable.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:end]  # CUDA ignores everything after an invalid entry
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in result.stdout.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(lines))] if result.returncode == 0 else []


def count_gpus_per_server(args: str) -> int:
    """Return the number of GPUs of one server with these vLLM options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for short, name in (("-tp", "tensor"), ("-pp", "pipeline")):
        flags = short, f"--{name}-parallel-size", f"--{name}_parallel_size"
        parser.add_argument(*flags, type=int, default=1, dest=name)
    try:
        options, _ = parser.parse_known_args(shlex.split(args))
    except argparse.ArgumentError:
        return 1  # vLLM reports the error
    return max(1, options.tensor * options.pipeline)


def trainer_memory_fraction(on_gpu: bool) -> float:
    """Return the fraction of each GPU's memory that XLA uses in this process, by its variables."""
    if not on_gpu:
        return 0.0
    fraction = next((os.environ[name] for name in _FRACTION_VARIABLES if os.environ.get(name)), "")
    try:
        return float(fraction or TRAINER_MEMORY_FRACTION)
    except ValueError:
        return TRAINER_MEMORY_FRACTION
