# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.plan --config FILE --topology v5p:4x4x4`: does the run fit a machine that is
not here, and what is the least its step takes?

The run's own step goes through the chip's own compiler; nothing is executed and no device opened.
Exit status 0: it fits; 1: it does not; 2: a mistake. Next: jaxmoe/plan/compiled.py.
"""

import argparse
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxmoe.cli import ExitStatus, arguments, config_of
from jaxmoe.config import Config, ConfigError, require
from jaxmoe.memory import size_text
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.plan import report
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.compiled import Step, compiled_step, mesh_on
from jaxmoe.plan.kernels import kernels_on
from jaxmoe.plan.roofline import bounds, work
from jaxmoe.rl.from_config import algorithm
from pallas_kernels.ahead_of_time import topology_of


def main(argv: Sequence[str] | None = None) -> int:
    with ExitStatus() as status:
        args = options().parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # chips that are here are not asked
        cfg = config_of(args)
        chip, devices = machine(args.topology)
        check(cfg, args.topology, len(devices))
        if not args.dry_run:
            status.code = plan(cfg, args.topology, chip, devices)
    return status.code


def options() -> argparse.ArgumentParser:
    """Those of every command, and the machine."""
    parser = arguments("Compile a run's step for a machine that is not here.")
    parser.add_argument("--topology", required=True, metavar="NAME",
                        help="v5p:4x4x4, or h200:2x8 for 2 hosts of 8")  # fmt: skip
    return parser


def machine(name: str) -> tuple[str, list[Any]]:
    """Chip and devices. Raises ConfigError where no compiler here knows the topology."""
    try:
        return topology_of(name)
    except ValueError as error:
        raise ConfigError(
            f"--topology must be one that a compiler knows, got {name!r}: {error}. "
            "Try --topology v5p:4x4x4."
        ) from error
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error


def check(cfg: Config, topology: str, devices: int) -> None:
    """Raises ConfigError where the run's mesh is not one of this machine."""
    axes = [f"--set mesh.{n}=1" for n, size in cfg.mesh.sizes.items() if size > 1 and n != "fsdp"]
    require(
        cfg.mesh.devices == devices,
        f"the axes of mesh must multiply to the {devices} devices of {topology}; they make "
        f"{cfg.mesh.devices}. Try {' '.join([f'--set mesh.fsdp={devices}', *axes])}.",
    )
    check_mesh(cfg)
    algorithm(cfg)


def plan(cfg: Config, topology: str, chip: str, devices: Sequence[Any]) -> int:
    """Compile and tell; 0 where it fits."""
    mesh = mesh_on(cfg, devices)
    axes = " x ".join(f"{n} {size}" for n, size in cfg.mesh.sizes.items() if size > 1)
    kernels = kernels_on(cfg, mesh)
    say(f"machine      {topology}, {len(devices)} devices ({axes or 'no mesh'})")
    say(f"kernels      {kernels.line}")
    r = cfg.rollout
    say(f"compiling    the step of RL on {r.sequences_per_step} sequences of up to "
        f"{cfg.context:,} tokens; minutes, as a rule…")  # fmt: skip
    found = compiled_step(cfg, mesh, kernels.impls)
    used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls = f"; {found.kernels} calls of Pallas kernels" if isinstance(found, Step) else ""
    say(
        f"compiled     in {found.seconds:.0f} s, with {size_text(used).strip()} of this host{calls}"
    )
    gpu, of = mesh.devices.flat[0].platform != "tpu", report.fit(cfg, found, CHIPS[chip])
    lines = ["", *report.memory_lines(cfg, found, of), ""]
    if isinstance(found, Step):
        host_of = [device.process_index for device in mesh.devices.flat]
        done = work(cfg, algorithm(cfg))
        least = bounds(done, found.collectives, CHIPS[chip], host_of)
        lines += [*report.traffic_lines(found, host_of, gpu), ""]
        lines += [*report.bound_lines(done, least, CHIPS[chip]), ""]
    say("\n".join([*lines, report.verdict(cfg, of, gpu)]))
    return 0 if of.missing <= 0 else 1


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
