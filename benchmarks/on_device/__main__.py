# SPDX-License-Identifier: Apache-2.0
"""Take from a card all that it can tell in some minutes, and go on where the last call ended.

    python -m benchmarks.on_device --out results --minutes 10
    python -m benchmarks.on_device --rehearse --out results --minutes 2
    python -m benchmarks.on_device --simulate
    JAX_PLATFORMS=cpu python -m benchmarks.on_device --compile h200

Stages are processes, in order of value (stages.py). They compile beside each other, and each has
the device alone while it measures. DIR/results.jsonl gets one JSON line a stage, with its figures,
commit, chip, driver, clocks and command; a stage that is in it, or in a file of --done, is skipped.
--compile runs nothing: it compiles the programs of steps, decoding, kernels and forms for a card
that is not here, one after the other, minutes each.
Exit status: 0, all stages of the list ended as they should, in a rehearsal the broken ones too; 1,
some did not; 2, nothing could begin.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.on_device import campaign, results
from benchmarks.on_device.rehearsal import REHEARSAL
from benchmarks.on_device.smoke import query_card
from benchmarks.on_device.stages import CAMPAIGNS, HERE
from pallas_kernels.ahead_of_time import compiler_unavailable
from pallas_kernels.check.child import NoChip, find_chip
from pallas_kernels.command_line import OneLineParser
from pallas_kernels.dispatch import Target

ROOT = Path(__file__).resolve().parents[2]
TOGETHER = 8
COMPILED_FOR = ("h100", "h200")  # the cards whose kernels the stages name

COMPILABLE = tuple(f"{HERE}.{x}" for x in ("train_step", "decode", "kernel_pair", "expert_tiles"))


def parse_arguments(argv: list[str] | None) -> tuple[OneLineParser, argparse.Namespace]:
    parser = OneLineParser("python -m benchmarks.on_device", __doc__)
    parser.add_argument("--out", type=Path, help="folder of results.jsonl and outputs.txt")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--done",
        type=Path,
        action="append",
        default=[],
        help="a file of earlier results, may be repeated",
    )
    parser.add_argument("--commit", help="of the files that run (default: what git says)")
    parser.add_argument(
        "--counts",
        action="append",
        default=[],
        metavar="COMMIT",
        help="its results count as this commit's, may be repeated",
    )
    parser.add_argument("--campaign", choices=CAMPAIGNS, default="gpu")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE")
    parser.add_argument("--together", type=int, default=TOGETHER, help="stages at a time")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a CPU")
    parser.add_argument("--simulate", action="store_true", help="print when stages would end")
    parser.add_argument("--compile", metavar="CHIP", help=f"{', '.join(COMPILED_FOR)}, without it")
    return parser, parser.parse_args(argv)


def choose_stages(parser: OneLineParser, args: argparse.Namespace) -> tuple[campaign.Stage, ...]:
    stages = REHEARSAL if args.rehearse else CAMPAIGNS[args.campaign]
    names = [stage.name for stage in stages]
    for name in args.only:
        parser.check_choice("--only", name, names)
    return tuple(x for x in stages if not args.only or x.name in args.only)


def print_simulation(stages: tuple[campaign.Stage, ...], together: int) -> None:
    for name, second in campaign.simulate(stages, together):
        print(f"{second / 60:5.1f} min  {name}")


def compile_stages(stages: Sequence[campaign.Stage], chip: str) -> int:
    """Compile what the stages run for a card that is not here; the exit status."""
    failed = []
    for stage in (x for x in stages if x.command[0] in COMPILABLE):
        print(f"{stage.name} for {chip}", flush=True)
        environ = {**os.environ, **dict(stage.environment)}
        command = [sys.executable, "-m", *stage.command, "--compile", chip]
        if subprocess.run(command, env=environ, cwd=ROOT).returncode:
            failed.append(stage.name)
    print(f"not compiled for {chip}: {', '.join(failed)}" if failed else "all compiled")
    return int(bool(failed))


def main(argv: list[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser, args = parse_arguments(argv)
    stages = choose_stages(parser, args)
    if args.together < 1:
        parser.error(f"--together must be at least 1; got {args.together}. Type --together 8.")
    if args.simulate:
        print_simulation(stages, args.together)
        return 0
    if args.compile:
        parser.check_choice("--compile", args.compile, COMPILED_FOR)
        if reason := compiler_unavailable(args.compile):
            parser.error(reason)
        return compile_stages(stages, args.compile)
    if args.out is None:
        parser.error("--out must name a folder; got none. Type --out results.")
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes must be above 0; got {args.minutes}. Type --minutes 10.")
    path = args.out / "results.jsonl"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        known = [x for file in (path, *args.done) for x in results.load_records(file)]
        results.drop_half_record(path)
    except (OSError, results.BadRecords) as error:
        parser.error(f"--out and --done must name results that can be read and written: {error}.")
    platform = "cpu" if args.rehearse else "gpu"
    try:
        chip = find_chip()
    except NoChip as error:
        parser.error(f"a GPU must be there: {error}. Type --rehearse for toy sizes on a CPU.")
    if chip["platform"] != platform:
        parser.error(
            f"the device must be a {platform}; JAX finds a {chip['platform']}. "
            + (
                "Type JAX_PLATFORMS=cpu before the command."
                if args.rehearse
                else "Type --rehearse for toy sizes on a CPU."
            )
        )
    if platform == "gpu" and not Target(platform, chip["kind"]).is_hopper:
        parser.error(
            "the card must be a Hopper GPU, whose kernels the stages name; this is a "
            f"{chip['kind']}. Type python -m pallas_kernels.check for what it can run."
        )
    commit = args.commit or results.read_commit(ROOT)
    expected = {stage.name: stage.expected for stage in stages}
    done = results.find_done(known, chip["kind"], (commit, *args.counts), expected)
    if others := results.describe_others(known, chip["kind"], (commit, *args.counts)):
        print(others, flush=True)
    todo = [stage for stage in stages if stage.name not in done]
    print(
        f"{chip['kind']}, jax {chip['jax']}, commit {commit}: {len(todo)} stages to do, "
        f"{len(stages) - len(todo)} done before",
        flush=True,
    )

    def save(stage: campaign.Stage, outcome: dict[str, Any]) -> None:
        output = outcome.pop("output")
        with (args.out / "outputs.txt").open("a") as file:
            file.write(f"=== {stage.name}: {outcome['status']}\n{output}\n")
        results.append_record(
            path,
            {
                "stage": stage.name,
                **outcome,
                "chip": chip["kind"],
                "driver": chip["driver"],
                "jax": chip["jax"],
                "clocks": query_card(),
                "commit": commit,
                "date": time.strftime("%Y-%m-%d"),
                "command": format_command(stage),
            },
        )
        if outcome["status"] == stage.expected:
            done[stage.name] = outcome

    with tempfile.TemporaryDirectory() as folder:
        campaign.run_campaign(
            todo,
            folder=Path(folder),
            seconds=60 * args.minutes,
            together=args.together,
            save=save,
            environ=stage_environ((path, *args.done)),
        )
    missing = [stage.name for stage in stages if stage.name not in done]
    print(
        f"{len(stages) - len(missing)} of {len(stages)} stages done: {path}"
        + f". Not done: {', '.join(missing)}" * bool(missing)
    )
    return int(bool(missing))


def format_command(stage: campaign.Stage) -> str:
    """The stage by itself, as it can be typed."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in stage.environment]
    return " ".join([*settings, shlex.join(["python", "-m", *stage.command])])


def stage_environ(records: Sequence[Path]) -> dict[str, str]:
    """The environment of all stages: programs that one compiled are read by the next."""
    cache = os.environ.get(
        "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir(), "programs"))
    )
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97",
        "ON_DEVICE_RESULTS": os.pathsep.join(map(str, records)),
    }


if __name__ == "__main__":
    sys.exit(main())
