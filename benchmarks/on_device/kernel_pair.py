# SPDX-License-Identifier: Apache-2.0
"""A stage: one of our kernels and a peer, checked and then timed in turn on the same card.

    python -m benchmarks.on_device.kernel_pair sink_attention --case full_20b \
        --vs benchmarks.kernel_peers:cudnn_sink

As `python -m benchmarks.kernels`, but the device is held alone for the timing only.
"""

import argparse
import sys

import jax
import jax.numpy as jnp

from benchmarks.kernels.__main__ import check_results, load_sides, time_sides
from benchmarks.kernels.compiled import compile_table
from benchmarks.on_device.stage import device_alone, device_shared, report
from pallas_kernels.bench.measure import JittedOp, measure_anchors
from pallas_kernels.bench.ops import OPS, cases_by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--case", required=True)
    parser.add_argument("--vs", required=True)
    parser.add_argument("--impl", default="mosaic_gpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compile", metavar="CHIP", help="compile our side for it, and run nothing"
    )
    args = parser.parse_args()
    if args.compile:
        op = OPS[args.op]
        case = cases_by_name(op)[args.case]
        table, compiled = compile_table(op, args.impl, "bfloat16", args.compile, (case,))
        report(op=args.op, case=args.case, compiled_for=args.compile, table=table.splitlines())
        sys.exit(0 if compiled and "refused" not in table else table)
    op, platform = OPS[args.op], jax.default_backend()
    case, names = cases_by_name(op)[args.case], (args.impl, args.vs)
    dtype = jnp.dtype("float32" if platform == "cpu" else "bfloat16")
    named = {"op": args.op, "case": args.case, "impl": args.impl, "peer": args.vs}
    sides = load_sides(op, case, names)
    shapes = jax.eval_shape(lambda: op.inputs(case, dtype, 1))
    ct = jax.eval_shape(op.call(case, "reference"), *shapes) if op.differentiated else None
    for side in sides:
        if isinstance(side, JittedOp):
            side.compile(shapes, ct)
    with device_shared():
        errors = check_results(op, case, names, dtype, sides)
    report(**named, errors={k: [x for x in v if x is not None] for k, v in errors.items()})
    with device_alone():
        anchors = measure_anchors(platform, dtype)
        rows = time_sides(op, case, sides, dtype, args.rounds, anchors)
    for row in rows:
        report(**named | row, product_tflops=anchors.matmul_tflops, copy_gbs=anchors.copy_gbs)


if __name__ == "__main__":
    main()
