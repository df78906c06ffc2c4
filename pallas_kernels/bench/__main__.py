# SPDX-License-Identifier: Apache-2.0
"""Check, then time, two implementations in turn; prints a table and one line of JSON.

    python -m pallas_kernels.bench sink_attention --impl mosaic_gpu --vs xla
    python -m pallas_kernels.bench grouped_matmul --vs my_package.peers:grouped --case gate_up_20b
    python -m pallas_kernels.bench sink_attention --growth
    JAX_PLATFORMS=cpu python -m pallas_kernels.bench sink_attention --impl mosaic_gpu --compile h200
    JAX_PLATFORMS=cpu python -m pallas_kernels.bench grouped_swiglu --compile v6e --schedule

Each round makes fresh random inputs and times both sides, in turns; a figure is the median over
rounds. TFLOP/s counts what is needed (causal: visible pairs only). `of matmul` and `of copy` are
shares of a matmul and a copy timed in the same process. --compile times nothing: it prints what a
chip's compiler says at the real sizes, and needs no such chip; with --schedule, cycles of each loop
and what its units do. What a side refuses is said in its
place; exit 2 where nothing can be done as typed. Next: `ops.py`, `measure.py`.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ahead_of_time import CHIPS, compiler_unavailable
from pallas_kernels.bench import schedule
from pallas_kernels.bench.compiled import figures
from pallas_kernels.bench.growth import growth
from pallas_kernels.bench.measure import Anchors, Ours, anchors, drawn, first_line, seconds, side
from pallas_kernels.bench.ops import OPS, Op, cases_of, cotangents, known, relative_error
from pallas_kernels.check.compare import fault
from pallas_kernels.check.sampled import looked_at, only, references, sample
from pallas_kernels.command_line import OneLineParser

BASELINES = Path(__file__).parents[1] / "baselines"
DTYPES = ("bfloat16", "float16", "float32")


class WrongResult(ValueError):
    """What a side computes is not what the reference does: there is nothing to time."""


def saved(path: Path) -> dict[str, dict[str, float]]:
    """Baselines of this device. Raises ValueError where the file holds none."""
    if not path.exists():
        return {}
    found = json.loads(path.read_bytes())
    rows = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(x, dict) and all(isinstance(y, float) for y in x.values()) for x in rows):
        raise ValueError("it holds something else")
    return found


def check(op: Op, case: Any, names: tuple[str, str], dtype: Any) -> dict[str, list[Any]]:
    """Relative errors of both sides against the float32 reference, of a large case in sampled rows.

    Raises: WrongResult where the first side errs, in some row, more than
    `pallas_kernels.check.compare` allows.
    """
    inputs = drawn(op, case, dtype, 1)
    at = sample(op, inputs)
    ct = cotangents(op, case, inputs, 1)
    ct = None if ct is None else only(op, ct, at)
    plain, right = references(op, case, inputs, ct, at)
    results = {"reference": plain}
    for name in names:
        runs = side(op, case, name).passes(inputs, ct)
        results[name] = looked_at(op, [x for run in runs.values() for x in flat(run())], at)
    found = {
        name: [
            None if a is None else relative_error(a, b)
            for a, b in zip(several, right, strict=False)
        ]
        for name, several in results.items()
    }
    outputs = len(op.results) - op.differentiated
    wrong = fault(op.results, results[names[0]], plain, right, dtype, outputs)
    if wrong:
        raise WrongResult(f"{case.name}: {wrong.replace(' errs', f' of {names[0]} errs', 1)}")
    return {name: found[name] for name in dict.fromkeys((*names, "reference"))}


def flat(results: Any) -> list[Any]:
    """The arrays of a run, None where a peer has none."""
    return jax.tree.leaves(results, is_leaf=lambda x: x is None)


def compare(
    op: Op, case: Any, names: tuple[str, str], dtype: Any, rounds: int, best: Anchors
) -> list[dict[str, Any]]:
    """One row per pass: both times, and what they are worth."""
    sides = [side(op, case, name) for name in names]
    times: dict[str, list[list[float]]] = {}
    for i in range(rounds):
        inputs = drawn(op, case, dtype, 100 + i)
        ct = cotangents(op, case, inputs, 100 + i)
        runs = [s.passes(inputs, ct) for s in sides]
        for name in [p for p in runs[0] if p in runs[1]]:
            pair = times.setdefault(name, [[], []])
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                pair[which].append(seconds(runs[which][name]))
    work = op.work(case, jnp.dtype(dtype).itemsize)
    flops = {"forward": work.flops, "backward": work.backward_flops}
    first = sides[0]
    temp = first.temp_bytes(inputs, ct) if isinstance(first, Ours) else {}
    rows = []
    for name, pair in times.items():
        a, b = (statistics.median(x) for x in pair)
        used = temp.get(name)
        rows.append({
            "case": case.name, "pass": name, "ms": 1e3 * a, "peer_ms": 1e3 * b, "speed": b / a,
            "rounds_ms": [1e3 * min(pair[0]), 1e3 * max(pair[0])],
            "tflops": 1e-12 * flops[name] / a,
            "of_matmul": 1e-12 * flops[name] / a / best.matmul_tflops,
            "of_copy": 1e-9 * work.bytes / a / best.copy_gbs if name == "forward" else None,
            "temp_mb": None if used is None else 1e-6 * used,
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]], names: tuple[str, str], old: dict[str, Any]) -> str:
    """The rows for people; `baseline` is the earlier time over this one."""
    short = [name.rpartition(":")[2] for name in names]
    head = ["case", "pass", f"{short[0]} ms", f"{short[1]} ms", "speed", "TFLOP/s", "of matmul",
            "of copy", "temp MB", "baseline"]  # fmt: skip
    lines = [head]
    for r in rows:
        before = old.get(f"{r['case']}/{r['pass']}")
        lines.append([
            r["case"], r["pass"], f"{r['ms']:.3f}", f"{r['peer_ms']:.3f}", f"{r['speed']:.2f}×",
            f"{r['tflops']:.3g}", f"{r['of_matmul']:.2f}",
            "" if r["of_copy"] is None else f"{r['of_copy']:.2f}",
            "" if r["temp_mb"] is None else f"{r['temp_mb']:.1f}",
            "" if before is None else f"{before / r['ms']:.2f}×",
        ])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        padded = [x.rjust(w) for x, w in zip(line, widths, strict=True)]
        line[:] = [x.ljust(w) for x, w in zip(line[:2], widths, strict=False)] + padded[2:]
    return "\n".join("  ".join(line) for line in lines)


def device_name() -> str:
    """The device's kind, as a file name."""
    return jax.devices()[0].device_kind.lower().replace(" ", "-").replace("/", "-")


def arguments(argv: list[str] | None) -> tuple[OneLineParser, argparse.Namespace]:
    """The parser, for what else is to be refused, and what was typed, sound in itself."""
    parser = OneLineParser("python -m pallas_kernels.bench", __doc__)
    parser.add_argument("op", help=", ".join(OPS))
    parser.add_argument("--impl", default="auto", help="the side under test (default: auto)")
    parser.add_argument("--vs", help="an implementation, or module:function (default: xla)")
    parser.add_argument("--case", action="append", help="by name, may be repeated (default: all)")
    parser.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--rounds", type=int, help="default: 10")
    parser.add_argument("--save", action="store_const", const=True,
                        help="keep the times as the baseline")  # fmt: skip
    instead = parser.add_mutually_exclusive_group()
    lengths = "exponents of time and memory over 1k to 64k tokens, on a CPU to 8k"
    instead.add_argument("--growth", action="store_true", help=lengths)
    instead.add_argument("--compile", metavar="CHIP", help=", ".join(CHIPS))
    parser.add_argument("--schedule", action="store_true",
                        help="with --compile: cycles of loops, use of units")  # fmt: skip
    args = parser.parse_args(argv)
    parser.check_choice("operation", args.op, OPS)
    parser.check_choice("--compile", args.compile, CHIPS)
    mode = "--growth" if args.growth else "--compile" if args.compile else None
    unread = {"--growth": ("vs", "rounds", "save", "case"), "--compile": ("vs", "rounds", "save")}
    given = [f"--{x}" for x in unread.get(mode or "", ()) if getattr(args, x) is not None]
    if given:
        all_of = ", ".join(f"--{x}" for x in unread[mode or ""])
        parser.error(f"{mode} must stand without {all_of}; got {', '.join(given)}. Leave it out.")
    if args.schedule and not args.compile:
        parser.error("--schedule must stand with --compile CHIP; got none. Type --compile v6e.")
    if args.schedule and (reason := schedule.refusal(args.compile, args.impl)):
        parser.error(reason)
    if args.growth and args.op != "sink_attention":
        parser.error("--growth must be of an operation with a length in it, sink_attention; got "
                     f"{args.op}. Type sink_attention --growth.")  # fmt: skip
    if mode and ":" in args.impl:
        parser.error(f"{mode} must have an implementation of ours; got --impl {args.impl}. "
                     "Type a name, as --impl xla.")  # fmt: skip
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {args.rounds}. Type --rounds 10.")
    parser.check_choice("--dtype", args.dtype, DTYPES)
    return parser, args


def unfit(op: Op, case: Any, flag: str, name: str, dtype: Any) -> str | None:
    """Why the side cannot do the case on this machine, None where nothing is known against it."""
    must = f"{flag} must name what can run here; got {name!r}: "
    try:
        side(op, case, name)
        if ":" not in name:
            jax.eval_shape(op.call(case, name), *jax.eval_shape(lambda: op.inputs(case, dtype, 0)))
    except (ValueError, ImportError, AttributeError, NotImplementedError) as error:
        hint = " Type module:function, as tests.bench.kernel_peers:flex." if ":" in name else ""
        return must + first_line(error).rstrip(".") + "." + hint
    return None


def unknown(op: Op, name: str) -> str | None:
    """Why no machine has the implementation, None where one has."""
    case = op.cases.BENCH_CASES[0]
    try:
        jax.eval_shape(op.call(case, name), *jax.eval_shape(lambda: op.inputs(case, "float32", 0)))
    except NotImplementedError:
        return None
    except ValueError as error:
        return f"--impl: {first_line(error)}"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser, args = arguments(argv)
    platform, op = jax.default_backend(), OPS[args.op]
    small = platform == "cpu" and not args.compile
    dtype = jnp.dtype(args.dtype or ("float32" if small else "bfloat16"))
    cases = known(op)
    for name in args.case or ():
        parser.check_choice("--case", name, cases)
    chosen = tuple(cases[name] for name in args.case or ())
    if args.compile:
        reason = compiler_unavailable(args.compile) or unknown(op, args.impl)
        if reason:
            parser.error(reason)
        if args.schedule:
            lines, real = 0, chosen or op.cases.REAL_CASES
            for line in schedule.tables(args.op, str(dtype), args.compile, real):
                print(line, flush=True)
                lines += "  refused: " not in line
            return 0 if lines > 1 else 1
        said, compiled = figures(op, args.impl, dtype, args.compile, chosen or op.cases.REAL_CASES)
        print(said)
        return 0 if compiled else 1
    if args.growth:
        reason = unfit(op, op.cases.BENCH_CASES[0], "--impl", args.impl, dtype)
        if reason:
            parser.error(reason)
        print(growth(args.impl, dtype, platform))
        return 0
    chosen = chosen or cases_of(op, platform)
    names, rounds = (args.impl, args.vs or "xla"), args.rounds or 10
    refused = {
        case.name: unfit(op, case, "--impl", names[0], dtype)
        or unfit(op, case, "--vs", names[1], dtype)
        for case in chosen
    }
    if all(refused.values()):
        parser.error(str(refused[chosen[0].name]))
    path = BASELINES / f"{device_name()}.json"
    try:
        kept = saved(path)
    except (OSError, ValueError) as error:
        parser.error(f"{path} must hold the times that --save wrote; it cannot be read: {error}. "
                     f"Type rm {path}")  # fmt: skip
    best = anchors(platform, dtype)
    print(f"{device_name()}, jax {jax.__version__}, {dtype}: matmul {best.matmul_tflops:.3g} "
          f"TFLOP/s, copy {best.copy_gbs:.3g} GB/s", flush=True)  # fmt: skip
    rows: list[dict[str, Any]] = []
    errors = {}
    for case in chosen:
        try:
            if refused[case.name]:
                raise NotImplementedError(refused[case.name])
            found = check(op, case, names, dtype)
            worst = {k: max(x for x in v if x is not None) for k, v in found.items()}
            said = ", ".join(f"{k} {x:.1e}" for k, x in worst.items())
            print(f"{case.name}: largest relative error: {said}", flush=True)
            rows += compare(op, case, names, dtype, rounds, best)
            errors[case.name] = found
        except WrongResult as error:
            parser.error(f"{args.op} must be right to be timed: {error}.")
        except (ImportError, NotImplementedError) as error:  # as peers say what they cannot do
            refused[case.name] = first_line(error)
            print(f"{case.name}: refused: {refused[case.name]}", flush=True)
    if not rows:
        parser.error(f"a comparison must have a case that both sides can do; got {names[0]} and "
                     f"{names[1]}: {refused[chosen[0].name]}")  # fmt: skip
    key = f"{args.op}/{args.impl}/{dtype}"
    print(table(rows, names, kept.get(key, {})))
    if args.save:
        kept[key] = {f"{r['case']}/{r['pass']}": round(r["ms"], 4) for r in rows}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    print(json.dumps({
        "op": args.op, "impl": names[0], "vs": names[1], "dtype": str(dtype),
        "device": device_name(), "jax": jax.__version__, "rounds": rounds,
        "matmul_tflops": best.matmul_tflops, "copy_gbs": best.copy_gbs, "errors": errors,
        "refused": {k: v for k, v in refused.items() if v}, "rows": rows,
    }, default=float))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
