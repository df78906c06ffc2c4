# SPDX-License-Identifier: Apache-2.0
"""Check and time two implementations of an operation; prints a table and one line of JSON.

    python -m benchmarks.kernels sink_attention --impl mosaic_gpu --vs xla
    python -m benchmarks.kernels grouped_matmul --vs my_package.peers:grouped --case gate_up_20b
    python -m benchmarks.kernels sink_attention --growth
    JAX_PLATFORMS=cpu python -m benchmarks.kernels sink_attention --impl mosaic_gpu --compile h200
    JAX_PLATFORMS=cpu python -m benchmarks.kernels grouped_swiglu --compile v6e --schedule

Each round makes new random inputs and times both sides, alternating which is first; a figure is the
median over rounds. TFLOP/s counts the necessary work (causal: visible pairs only). `of matmul` and
`of copy` are fractions of a matmul and a copy timed in the same process. --compile times nothing:
it prints a chip's compiler's figures at the real sizes, and needs no such chip; with --schedule,
cycles of each loop and the use of its units. A case that a side refuses has the reason in its row.
Exit status 2: nothing could be done as typed. Next: `ops.py`, `measure.py`.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import schedule
from benchmarks.kernels.compiled import compile_table
from benchmarks.kernels.growth import format_growth
from pallas_kernels.ahead_of_time import CHIPS, compiler_unavailable
from pallas_kernels.bench.measure import (
    Anchors,
    JittedOp,
    Peer,
    first_line,
    generate_inputs,
    load_side,
    measure_anchors,
    time_run,
)
from pallas_kernels.bench.ops import (
    OPS,
    Op,
    bench_cases,
    cases_by_name,
    make_cotangents,
    relative_error,
)
from pallas_kernels.check.compare import find_wrong_result
from pallas_kernels.check.sampled import (
    mask_cotangents,
    run_references,
    sample_rows,
    select_compared,
)
from pallas_kernels.command_line import OneLineParser

BASELINES = Path(__file__).parent / "baselines"
DTYPES = ("bfloat16", "float16", "float32")
Sides = tuple[JittedOp | Peer, JittedOp | Peer]


class WrongResult(ValueError):
    """A side's result differs from the reference, so its time means nothing."""


def load_baselines(path: Path) -> dict[str, dict[str, float]]:
    """Load this device's baselines. Raises ValueError when the file contains something else."""
    if not path.exists():
        return {}
    baselines = json.loads(path.read_bytes())
    rows = baselines.values() if isinstance(baselines, dict) else [None]
    if not all(isinstance(x, dict) and all(isinstance(y, float) for y in x.values()) for x in rows):
        raise ValueError("it does not contain baselines")
    return baselines


def load_sides(op: Op, case: Any, names: tuple[str, str]) -> Sides:
    """The two sides of a case; what they compile is used by the check and by the timing."""
    return load_side(op, case, names[0]), load_side(op, case, names[1])


def check_results(
    op: Op, case: Any, names: tuple[str, str], dtype: Any, sides: Sides
) -> dict[str, list[Any]]:
    """Relative errors of both sides against the float32 reference; large cases in sampled rows.

    Raises: WrongResult when an error of the first side, in some row, exceeds the limit of
    `pallas_kernels.check.compare`.
    """
    inputs = generate_inputs(op, case, dtype, 1)
    row_ids = sample_rows(op, inputs)
    ct = make_cotangents(op, case, inputs, 1)
    ct = None if ct is None else mask_cotangents(op, ct, row_ids)
    naive, expected = run_references(op, case, inputs, ct, row_ids)
    results = {"reference": naive}
    for name, side in zip(names, sides, strict=True):
        runs = side.passes(inputs, ct)
        results[name] = select_compared(
            op, [x for run in runs.values() for x in flatten_results(run())], row_ids
        )
    errors = {
        name: [
            None if a is None else relative_error(a, b)
            for a, b in zip(several, expected, strict=False)
        ]
        for name, several in results.items()
    }
    outputs = len(op.results) - op.differentiated
    message = find_wrong_result(op.results, results[names[0]], naive, expected, dtype, outputs)
    if message:
        raise WrongResult(f"{case.name}, {names[0]}: {message}")
    return {name: errors[name] for name in dict.fromkeys((*names, "reference"))}


def flatten_results(results: Any) -> list[Any]:
    """The arrays of a run, with None for results that a peer does not have."""
    return jax.tree.leaves(results, is_leaf=lambda x: x is None)


def time_sides(
    op: Op, case: Any, sides: Sides, dtype: Any, rounds: int, anchors: Anchors
) -> list[dict[str, Any]]:
    """Time both sides; one row per pass with times, speed and throughput."""
    times: dict[str, list[list[float]]] = {}
    for i in range(rounds):
        inputs = generate_inputs(op, case, dtype, 100 + i)
        ct = make_cotangents(op, case, inputs, 100 + i)
        runs = [s.passes(inputs, ct) for s in sides]
        for name in [p for p in runs[0] if p in runs[1]]:
            pair = times.setdefault(name, [[], []])
            # Alternating, so that a clock that rises or falls favours neither side.
            for index in (0, 1) if i % 2 == 0 else (1, 0):
                pair[index].append(time_run(runs[index][name]))
    work = op.work(case, jnp.dtype(dtype).itemsize)
    flops = {"forward": work.flops, "backward": work.backward_flops}
    first = sides[0]
    temp = first.temp_bytes(inputs, ct) if isinstance(first, JittedOp) else {}
    rows = []
    for name, pair in times.items():
        a, b = (statistics.median(x) for x in pair)
        used = temp.get(name)
        rows.append(
            {
                "case": case.name,
                "pass": name,
                "ms": 1e3 * a,
                "peer_ms": 1e3 * b,
                "speed": b / a,
                "rounds_ms": [1e3 * min(pair[0]), 1e3 * max(pair[0])],
                "tflops": 1e-12 * flops[name] / a,
                "of_matmul": 1e-12 * flops[name] / a / anchors.matmul_tflops,
                "of_copy": 1e-9 * work.bytes / a / anchors.copy_gbs if name == "forward" else None,
                "temp_mb": None if used is None else 1e-6 * used,
            }
        )
    return rows


def format_bench_table(
    rows: list[dict[str, Any]], names: tuple[str, str], old: dict[str, Any]
) -> str:
    """Format the rows as a table; `baseline` is the saved time over this one."""
    short = [name.rpartition(":")[2] for name in names]
    head = [
        "case",
        "pass",
        f"{short[0]} ms",
        f"{short[1]} ms",
        "speed",
        "TFLOP/s",
        "of matmul",
        "of copy",
        "temp MB",
        "baseline",
    ]
    lines = [head]
    for r in rows:
        before = old.get(f"{r['case']}/{r['pass']}")
        lines.append(
            [
                r["case"],
                r["pass"],
                f"{r['ms']:.3f}",
                f"{r['peer_ms']:.3f}",
                f"{r['speed']:.2f}×",
                f"{r['tflops']:.3g}",
                f"{r['of_matmul']:.2f}",
                "" if r["of_copy"] is None else f"{r['of_copy']:.2f}",
                "" if r["temp_mb"] is None else f"{r['temp_mb']:.1f}",
                "" if before is None else f"{before / r['ms']:.2f}×",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        padded = [x.rjust(w) for x, w in zip(line, widths, strict=True)]
        line[:] = [x.ljust(w) for x, w in zip(line[:2], widths, strict=False)] + padded[2:]
    return "\n".join("  ".join(line) for line in lines)


def device_name() -> str:
    """The device's kind, as a file name."""
    return jax.devices()[0].device_kind.lower().replace(" ", "-").replace("/", "-")


def parse_bench_arguments(argv: list[str] | None) -> tuple[OneLineParser, argparse.Namespace]:
    """Parse and validate the command line; the parser is returned for later errors."""
    parser = OneLineParser("python -m benchmarks.kernels", __doc__)
    parser.add_argument("op", help=", ".join(OPS))
    parser.add_argument("--impl", default="auto", help="the side under test (default: auto)")
    parser.add_argument("--vs", help="an implementation, or module:function (default: xla)")
    parser.add_argument("--case", action="append", help="by name, may be repeated (default: all)")
    parser.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--rounds", type=int, help="default: 10")
    parser.add_argument(
        "--save", action="store_const", const=True, help="save the times as the baseline"
    )
    modes = parser.add_mutually_exclusive_group()
    lengths = "exponents of time and memory over 1k to 64k tokens, on a CPU to 8k"
    modes.add_argument("--growth", action="store_true", help=lengths)
    modes.add_argument("--compile", metavar="CHIP", help=", ".join(CHIPS))
    parser.add_argument(
        "--schedule", action="store_true", help="with --compile: cycles of loops, use of units"
    )
    args = parser.parse_args(argv)
    parser.check_choice("operation", args.op, OPS)
    parser.check_choice("--compile", args.compile, CHIPS)
    mode = "--growth" if args.growth else "--compile" if args.compile else None
    unread = {"--growth": ("vs", "rounds", "save", "case"), "--compile": ("vs", "rounds", "save")}
    conflicting = [f"--{x}" for x in unread.get(mode or "", ()) if getattr(args, x) is not None]
    if conflicting:
        forbidden = ", ".join(f"--{x}" for x in unread[mode or ""])
        parser.error(
            f"{mode} must stand without {forbidden}; got {', '.join(conflicting)}. Leave it out."
        )
    if args.schedule and not args.compile:
        parser.error("--schedule must stand with --compile CHIP; got none. Type --compile v6e.")
    if args.schedule and (reason := schedule.schedule_refusal(args.compile, args.impl)):
        parser.error(reason)
    if args.growth and args.op != "sink_attention":
        parser.error(
            "--growth must be of an operation with a length, sink_attention; got "
            f"{args.op}. Type sink_attention --growth."
        )
    if mode and ":" in args.impl:
        parser.error(
            f"{mode} needs an implementation of this package; got --impl {args.impl}. "
            "Type a name, as --impl xla."
        )
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {args.rounds}. Type --rounds 10.")
    parser.check_choice("--dtype", args.dtype, DTYPES)
    return parser, args


def find_refusal(op: Op, case: Any, flag: str, name: str, dtype: Any) -> str | None:
    """Return the reason why the side cannot run the case on this machine, or None."""
    prefix = f"{flag} must name an implementation that runs on this machine; got {name!r}: "
    try:
        load_side(op, case, name)
        if ":" not in name:
            jax.eval_shape(op.call(case, name), *jax.eval_shape(lambda: op.inputs(case, dtype, 0)))
    except (ValueError, ImportError, AttributeError, NotImplementedError) as error:
        hint = " Type module:function, as benchmarks.kernel_peers:flex." if ":" in name else ""
        return prefix + first_line(error).rstrip(".") + "." + hint
    return None


def find_unknown_impl(op: Op, name: str) -> str | None:
    """Return the error message if no machine has the implementation, or None."""
    case = op.cases.BENCH_CASES[0]
    try:
        jax.eval_shape(op.call(case, name), *jax.eval_shape(lambda: op.inputs(case, "float32", 0)))
    except NotImplementedError:
        return None
    except ValueError as error:
        return f"--impl: {first_line(error)}"
    return None


def find_untuned(platform: str, flags: str) -> str | None:
    """Return why times on a GPU with these XLA_FLAGS would mean nothing, or None."""
    if platform != "gpu" or "--xla_gpu_autotune_level=0" not in flags.split():
        return None
    return (
        "a peer and a matmul must be timed with the algorithms that XLA chooses; got "
        "--xla_gpu_autotune_level=0 in XLA_FLAGS, with which an H100's matmul has 10 TFLOP/s. "
        "Type the command without that flag."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser, args = parse_bench_arguments(argv)
    platform, op = jax.default_backend(), OPS[args.op]
    small = platform == "cpu" and not args.compile
    dtype = jnp.dtype(args.dtype or ("float32" if small else "bfloat16"))
    cases = cases_by_name(op)
    for name in args.case or ():
        parser.check_choice("--case", name, cases)
    chosen = tuple(cases[name] for name in args.case or ())
    if args.compile:
        reason = compiler_unavailable(args.compile) or find_unknown_impl(op, args.impl)
        if reason:
            parser.error(reason)
        if args.schedule:
            lines, real = 0, chosen or op.cases.REAL_CASES
            for line in schedule.format_schedules(args.op, str(dtype), args.compile, real):
                print(line, flush=True)
                lines += "  refused: " not in line
            return 0 if lines > 1 else 1
        text, compiled = compile_table(
            op, args.impl, dtype, args.compile, chosen or op.cases.REAL_CASES
        )
        print(text)
        return 0 if compiled else 1
    if args.growth:
        reason = find_refusal(op, op.cases.BENCH_CASES[0], "--impl", args.impl, dtype)
        if reason:
            parser.error(reason)
        print(format_growth(args.impl, dtype, platform))
        return 0
    chosen = chosen or bench_cases(op, platform)
    names, rounds = (args.impl, args.vs or "xla"), args.rounds or 10
    refused = {
        case.name: find_refusal(op, case, "--impl", names[0], dtype)
        or find_refusal(op, case, "--vs", names[1], dtype)
        for case in chosen
    }
    if all(refused.values()):
        parser.error(str(refused[chosen[0].name]))
    untuned = find_untuned(platform, os.environ.get("XLA_FLAGS", ""))
    if untuned:
        parser.error(untuned)
    path = BASELINES / f"{device_name()}.json"
    try:
        baselines = load_baselines(path)
    except (OSError, ValueError) as error:
        parser.error(
            f"{path} must contain times written by --save; cannot read it: {error}. Type rm {path}"
        )
    anchors = measure_anchors(platform, dtype)
    print(
        f"{device_name()}, jax {jax.__version__}, {dtype}: matmul {anchors.matmul_tflops:.3g} "
        f"TFLOP/s, copy {anchors.copy_gbs:.3g} GB/s",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    errors = {}
    for case in chosen:
        try:
            if refused[case.name]:
                raise NotImplementedError(refused[case.name])
            sides = load_sides(op, case, names)
            case_errors = check_results(op, case, names, dtype, sides)
            worst = {k: max(x for x in v if x is not None) for k, v in case_errors.items()}
            text = ", ".join(f"{k} {x:.1e}" for k, x in worst.items())
            print(f"{case.name}: largest relative error: {text}", flush=True)
            rows += time_sides(op, case, sides, dtype, rounds, anchors)
            errors[case.name] = case_errors
        except WrongResult as error:
            parser.error(f"{args.op} must be correct to be timed: {error}.")
        except (ImportError, NotImplementedError) as error:  # how peers refuse a case
            refused[case.name] = first_line(error)
            print(f"{case.name}: refused: {refused[case.name]}", flush=True)
    if not rows:
        parser.error(
            f"a comparison needs a case that both sides support; got {names[0]} and "
            f"{names[1]}: {refused[chosen[0].name]}"
        )
    key = f"{args.op}/{args.impl}/{dtype}"
    print(format_bench_table(rows, names, baselines.get(key, {})))
    if args.save:
        baselines[key] = {f"{r['case']}/{r['pass']}": round(r["ms"], 4) for r in rows}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(baselines, indent=1, sort_keys=True) + "\n")
    print(
        json.dumps(
            {
                "op": args.op,
                "impl": names[0],
                "vs": names[1],
                "dtype": str(dtype),
                "device": device_name(),
                "jax": jax.__version__,
                "rounds": rounds,
                "matmul_tflops": anchors.matmul_tflops,
                "copy_gbs": anchors.copy_gbs,
                "errors": errors,
                "refused": {k: v for k, v in refused.items() if v},
                "rows": rows,
            },
            default=float,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
