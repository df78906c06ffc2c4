# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.plan --config FILE --topology v5p:4x4x4`: does the run fit another machine, and
what is the lower bound of its step time?

The run's step and its engine's prefill and decode are compiled by the chip's compiler; nothing is
executed and no device is opened.
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

from jaxmoe.batches.computed_tokens import describe_sharing, shared_at_full_lengths
from jaxmoe.cli import ExitStatus, build_parser, config_from_args
from jaxmoe.config import Config, ConfigError, describe_engine, require
from jaxmoe.model import make_ops
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.plan import report
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.compiled import CompiledStep, TooLarge, compile_rl_step, mesh_on
from jaxmoe.plan.kernels import choose_mesh_kernels
from jaxmoe.plan.roofline import sampling_work, step_bounds, step_work
from jaxmoe.plan.sampler import CompiledSampler, compile_sampler
from jaxmoe.plan.schedules import libtpu_dump_folder, time_kernels
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.run.memory import format_bytes, plan_memory
from pallas_kernels.ahead_of_time import parse_topology


def main(argv: Sequence[str] | None = None, schedules: Path | None = None) -> int:
    """Run the command; `schedules` is the folder where libtpu, not loaded yet, writes schedules."""
    with ExitStatus() as status:
        args = make_plan_parser().parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # this machine's accelerators are not used
        cfg = config_from_args(args)
        chip, devices = find_machine(args.topology)
        check_plan(cfg, args.topology, len(devices))
        if not args.dry_run:
            typed = shlex.join(sys.argv[1:] if argv is None else argv)
            command = f"python -m jaxmoe.plan {typed}"
            status.code = compile_plan(cfg, args.topology, chip, devices, command, schedules)
    return status.code


def make_plan_parser() -> argparse.ArgumentParser:
    """The parser with the options of every command and --topology."""
    parser = build_parser("Compile a run's step for another machine.")
    parser.prog = "python -m jaxmoe.plan"
    parser.add_argument(
        "--topology", required=True, metavar="NAME", help="v5p:4x4x4, or h200:2x8 for 2 hosts of 8"
    )
    return parser


def find_machine(name: str) -> tuple[str, list[Any]]:
    """Chip and devices. Raises ConfigError when no installed compiler knows the topology."""
    try:
        return parse_topology(name)
    except ValueError as error:
        raise ConfigError(
            f"--topology must be one that a compiler knows, got {name!r}: {error}. "
            "Try --topology v5p:4x4x4."
        ) from error
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error


def check_plan(cfg: Config, topology: str, devices: int) -> None:
    """Raise ConfigError when the run's mesh does not match the machine."""
    axes = [f"--set mesh.{n}=1" for n, size in cfg.mesh.sizes.items() if size > 1 and n != "fsdp"]
    require(
        cfg.mesh.devices == devices,
        f"the axes of mesh must multiply to the {devices} devices of {topology}; they make "
        f"{cfg.mesh.devices}. Try {' '.join([f'--set mesh.fsdp={devices}', *axes])}.",
    )
    check_mesh(cfg)
    algorithm_from_config(cfg)


def compile_plan(
    cfg: Config,
    topology: str,
    chip: str,
    devices: Sequence[Any],
    command: str,
    schedules: Path | None = None,
) -> int:
    """Compile and print the report; returns 0 if the run fits. `command` was typed by the user."""
    mem, capacity = plan_memory(cfg), CHIPS[chip].memory
    axes = " x ".join(f"{n} {size}" for n, size in cfg.mesh.sizes.items() if size > 1)
    try:
        mesh = mesh_on(cfg, devices)
    except NotImplementedError as error:  # an axis must be a product of a torus's sides
        raise ConfigError(
            f"each axis of mesh must be a product of sides of {topology}, got {axes}. Try "
            "--set mesh.fsdp=4 --set mesh.expert=4, or others of such sizes."
        ) from error
    gpu = mesh.devices.flat[0].platform != "tpu"
    kernels = choose_mesh_kernels(cfg, mesh)
    print_text(f"machine      {topology}, {len(devices)} devices ({axes or 'no mesh'})")
    print_text(f"kernels      {kernels.line}")
    attend = make_ops(cfg, kernels.impls).attend
    if shared_line := describe_sharing(cfg, attend):
        print_text(shared_line.strip())
    state = mem.state
    # Arithmetic answers in seconds what the compiler would take minutes to say.
    if (state_fit := report.Fit(state, mem.engine_copy, capacity)).missing > 0:
        print_text(
            f"not compiled: of {format_bytes(capacity).strip()} on a device the state takes "
            f"{format_bytes(state).strip()} and the engine's weights "
            f"{format_bytes(mem.engine_copy).strip()}\n"
        )
        print_text(report.format_fit(cfg, state_fit, gpu, command))
        return 1
    r = cfg.rollout
    print_text(
        f"compiling    the RL step on {r.sequences_per_step} sequences of up to "
        f"{cfg.context:,} tokens; this may take minutes…"
    )
    step = compile_rl_step(cfg, mesh, kernels.impls)
    calls = f"; {step.kernels} calls of Pallas kernels" if isinstance(step, CompiledStep) else ""
    print_text(f"compiled     in {step.seconds:.0f} s, {host_memory()} of host memory{calls}\n")
    fit = report.step_fit(cfg, step, CHIPS[chip])
    print_text("\n".join([*report.memory_lines(cfg, step, fit), ""]))
    # A suggestion must not count on a compiler that needs less than the arithmetic.
    ratios = max(1.0, (fit.step + fit.outside) / mem.training), 1.0
    if isinstance(step, TooLarge):
        print_text(report.format_fit(cfg, fit, gpu, command, ratios))
        return 1
    host_of = [device.process_index for device in mesh.devices.flat]
    a = algorithm_from_config(cfg)
    sharing = shared_at_full_lengths(cfg, attend)
    work = step_work(cfg, a, sharing)
    kernel_time = None
    if schedules and step.tpu_kernels:
        kernel_time = time_kernels(
            cfg, mesh, step.tpu_kernels, schedules, chip, CHIPS[chip], sharing
        )
    bounds = step_bounds(work, step.collectives, CHIPS[chip], host_of, kernel_time)
    print_text("\n".join([*report.traffic_lines(step, host_of, gpu), ""]))
    scores = report.describe_scoring(cfg, a)
    lines = report.bound_lines(work, bounds, CHIPS[chip], scores, kernel_time)
    print_text("\n".join([*lines, ""]))
    sampler = None
    if fit.missing <= 0 and describe_engine(cfg).uses_trainer_forward:
        print_text("compiling    the engine's prefill and decode…")
        sampler = compile_sampler(cfg, mesh, kernels.impls)
    if sampler is not None:
        print_text(f"compiled     in {sampler.seconds:.0f} s, {host_memory()} of host memory\n")
        sampled = report.sampler_fit(cfg, sampler, CHIPS[chip])
        if isinstance(sampler, CompiledSampler):
            print_text("\n".join([*report.sampler_lines(sampler, sampled), ""]))
            collectives = sampler.prefill_collectives, sampler.token_collectives
            prefill, token = [
                step_bounds(part, sent, CHIPS[chip], host_of)
                for part, sent in zip(sampling_work(cfg, sampler.prompts), collectives, strict=True)
            ]
            lines = report.sampling_lines(cfg, sampler, prefill, token, work, bounds, CHIPS[chip])
            print_text("\n".join(lines) + "\n")
        if sampled.missing > fit.missing:
            ratios = ratios[0], max(1.0, (sampled.step + sampled.outside) / mem.sampling)
            fit = sampled
    print_text(report.format_fit(cfg, fit, gpu, command, ratios))
    return 0 if fit.missing <= 0 else 1


def host_memory() -> str:
    """Peak memory of this process."""
    # Linux reports kilobytes.
    return format_bytes(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).strip()


def print_text(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    with libtpu_dump_folder() as folder:
        sys.exit(main(schedules=folder))
