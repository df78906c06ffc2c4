# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.plan --config FILE --topology v5p:4x4x4`: does the run fit a machine that is
not here, and what is the least its step takes?

The run's own step, and its engine's prefill and decode, go through the chip's own
compiler; nothing is executed and no device opened.
Exit status 0: it fits; 1: it does not; 2: a mistake. Next: jaxmoe/plan/compiled.py.
"""

import argparse
import resource
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmoe.cli import ExitStatus, arguments, config_of
from jaxmoe.config import Config, ConfigError, require
from jaxmoe.memory import format_bytes, plan_memory
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.plan import report
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.compiled import Step, TooLarge, compiled_step, mesh_on
from jaxmoe.plan.kernels import kernels_on
from jaxmoe.plan.roofline import bounds, wave_work, work
from jaxmoe.plan.sampler import Wave, compiled_wave
from jaxmoe.plan.schedules import left_by_libtpu, scheduled
from jaxmoe.rl.from_config import algorithm_from_config
from pallas_kernels.ahead_of_time import parse_topology


def main(argv: Sequence[str] | None = None, schedules: Path | None = None) -> int:
    """`schedules`: where libtpu leaves what it scheduled, of a process that has not loaded it."""
    with ExitStatus() as status:
        args = options().parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # chips that are here are not asked
        cfg = config_of(args)
        chip, devices = machine(args.topology)
        check(cfg, args.topology, len(devices))
        if not args.dry_run:
            typed = shlex.join(sys.argv[1:] if argv is None else argv)
            command = f"python -m jaxmoe.plan {typed}"
            status.code = plan(cfg, args.topology, chip, devices, command, schedules)
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
        return parse_topology(name)
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
    algorithm_from_config(cfg)


def plan(
    cfg: Config, topology: str, chip: str, devices: Sequence[Any], command: str,
    schedules: Path | None = None,
) -> int:  # fmt: skip
    """Compile and tell; 0 where it fits. `command` is what was typed."""
    mem, there = plan_memory(cfg), CHIPS[chip].memory
    axes = " x ".join(f"{n} {size}" for n, size in cfg.mesh.sizes.items() if size > 1)
    try:
        mesh = mesh_on(cfg, devices)
    except NotImplementedError as error:  # a torus is cut along its sides alone
        raise ConfigError(
            f"each axis of mesh must be a product of sides of {topology}, got {axes}. Try "
            "--set mesh.fsdp=4 --set mesh.expert=4, or others of such sizes."
        ) from error
    gpu = mesh.devices.flat[0].platform != "tpu"
    kernels = kernels_on(cfg, mesh)
    say(f"machine      {topology}, {len(devices)} devices ({axes or 'no mesh'})")
    say(f"kernels      {kernels.line}")
    state = mem.weights + mem.optimizer + mem.reference
    if (least := report.Fit(state, mem.engine_copy, there)).missing > 0:
        say(f"not compiled: the state alone takes {format_bytes(state).strip()} of a device, the "
            f"engine's weights {format_bytes(mem.engine_copy).strip()}, of "
            f"{format_bytes(there).strip()}\n")  # fmt: skip
        say(report.verdict(cfg, least, gpu, command))
        return 1
    r = cfg.rollout
    say(f"compiling    the step of RL on {r.sequences_per_step} sequences of up to "
        f"{cfg.context:,} tokens; minutes, as a rule…")  # fmt: skip
    found = compiled_step(cfg, mesh, kernels.impls)
    calls = f"; {found.kernels} calls of Pallas kernels" if isinstance(found, Step) else ""
    say(f"compiled     in {found.seconds:.0f} s, with {host_memory()} of this host{calls}\n")
    of = report.fit(cfg, found, CHIPS[chip])
    say("\n".join([*report.memory_lines(cfg, found, of), ""]))
    off = max(1.0, (of.step + of.beside) / mem.training), 1.0
    if isinstance(found, TooLarge):
        say(report.verdict(cfg, of, gpu, command, off))
        return 1
    host_of = [device.process_index for device in mesh.devices.flat]
    a = algorithm_from_config(cfg)
    done = work(cfg, a)
    by_schedule = None
    if schedules and found.tpu_kernels:
        by_schedule = scheduled(cfg, mesh, found.tpu_kernels, schedules, chip, CHIPS[chip])
    least = bounds(done, found.collectives, CHIPS[chip], host_of, by_schedule)
    say("\n".join([*report.traffic_lines(found, host_of, gpu), ""]))
    scores = report.passes(cfg, a)
    say("\n".join([*report.bound_lines(done, least, CHIPS[chip], scores, by_schedule), ""]))
    if of.missing <= 0 and r.engine == "native":
        say("compiling    the engine's prefill and decode…")
        wave = compiled_wave(cfg, mesh, kernels.impls)
        say(f"compiled     in {wave.seconds:.0f} s, with {host_memory()} of this host\n")
        sampled = report.wave_fit(cfg, wave, CHIPS[chip])
        if isinstance(wave, Wave):
            say("\n".join([*report.wave_lines(wave, sampled), ""]))
            prefill, token = [
                bounds(one, travels, CHIPS[chip], host_of)
                for one, travels in zip(
                    wave_work(cfg, wave.prompts), (wave.before, wave.token), strict=True
                )
            ]
            say(
                "\n".join(
                    report.sampling_lines(cfg, wave, prefill, token, done, least, CHIPS[chip])
                )
                + "\n"
            )
        if sampled.missing > of.missing:
            of, off = sampled, (off[0], max(1.0, (sampled.step + sampled.beside) / mem.sampling))
    say(report.verdict(cfg, of, gpu, command, off))
    return 0 if of.missing <= 0 else 1


def host_memory() -> str:
    """The most that this process has held."""
    return format_bytes(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).strip()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    with left_by_libtpu() as folder:
        sys.exit(main(schedules=folder))
