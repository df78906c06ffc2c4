# SPDX-License-Identifier: Apache-2.0
"""Check this machine's kernels against the reference, each in a separate process.

    python -m pallas_kernels.check
    python -m pallas_kernels.check sink_attention --impl mosaic_gpu --again

A check compares values and gradients on small hard cases and requires the same bits in three calls.
A kernel that hangs is killed at the timeout. The verdicts are stored, and a run with
`kernels="auto"` uses them, after a check at its own sizes.
Exit status: 0 all kernels are correct or do not support the cases; 1 one is wrong or could not be
checked; 2 nothing can be checked.
"""

import argparse
import sys

from pallas_kernels.check import child
from pallas_kernels.check.choice import (
    PLAIN,
    PLATFORMS,
    describe_verdict,
    make_judge,
    may_have_accelerator,
)
from pallas_kernels.command_line import OneLineParser


def parse_check_arguments(argv: list[str] | None) -> tuple[OneLineParser, argparse.Namespace]:
    """Parse and validate the command line; the parser is returned for later errors."""
    parser = OneLineParser("python -m pallas_kernels.check", __doc__)
    names = list(dict.fromkeys(name for impls in PLATFORMS.values() for name in impls))
    parser.add_argument("operation", nargs="*", help=f"{', '.join(PLATFORMS)} (default: all)")
    parser.add_argument("--impl", help=f"{', '.join(names)} (default: this platform's kernels)")
    parser.add_argument("--dtype", default="bfloat16", help="or float32 (default: %(default)s)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=child.TIMEOUT_S,
        metavar="S",
        help="seconds for each kernel (default: %(default)g)",
    )
    parser.add_argument("--again", action="store_true", help="ignore stored verdicts")
    args = parser.parse_args(argv)
    for name in args.operation:
        parser.check_choice("operation", name, PLATFORMS)
    parser.check_choice("--impl", args.impl, names)
    parser.check_choice("--dtype", args.dtype, ("bfloat16", "float32"))
    if not args.timeout > 0:
        parser.error(f"--timeout must be above 0; got {args.timeout:g}. Type --timeout 600.")
    args.pairs = [
        (operation, impl)
        for operation in args.operation or PLATFORMS
        for impl in PLATFORMS[operation]
        if impl == args.impl or (args.impl is None and impl not in PLAIN)
    ]
    if not args.pairs:
        parser.error(
            f"--impl must name an implementation of {' and '.join(args.operation)}; got "
            f"{args.impl}. Leave --impl out for this platform's kernels."
        )
    return parser, args


def main(argv: list[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser, args = parse_check_arguments(argv)
    try:
        chip = (
            child.find_chip()
            if may_have_accelerator() or args.impl in PLAIN
            else {"platform": "cpu"}
        )
    except child.NoChip as error:
        parser.error(f"the device must be free for a check: {error}.")
    runnable = [(o, i) for o, i in args.pairs if chip["platform"] in PLATFORMS[o][i]]
    if not runnable:
        parser.error(
            f"the kernels must run on their platform; this machine is a "
            f"{chip['platform']}. To check the XLA implementation type --impl xla."
        )
    judge = make_judge(chip, args.dtype, {}, timeout_s=args.timeout, recheck=args.again)
    print(f"{chip['kind']}, jax {chip['jax']}, {args.dtype}", flush=True)
    failed = False
    for operation, impl in runnable:
        verdict = judge(operation, impl)
        failed |= verdict.kind in ("wrong", "unknown")
        text = f"correct, {verdict.reason}" if verdict.is_right else describe_verdict(verdict)
        print(f"{operation:<17}{impl:<21}{text}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
