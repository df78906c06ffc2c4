# SPDX-License-Identifier: Apache-2.0
"""Check this machine's kernels against the reference, each in a process of its own.

    python -m pallas_kernels.check
    python -m pallas_kernels.check sink_attention --impl mosaic_gpu --again

Small hostile cases: values and gradients, and the same bits three times. What hangs is killed when
its time is over. The verdicts are kept, and `kernels="auto"` of a run goes by them (a run adds a
case of its own size). Exit status: 0 all are right, 1 one is wrong or cannot be
checked, 2 nothing can be checked.
"""

import argparse
import sys

from pallas_kernels.check import child
from pallas_kernels.check.choice import PLAIN, PLATFORMS, judge_here, may_have_a_chip, said
from pallas_kernels.command_line import OneLineParser


def arguments(argv: list[str] | None) -> tuple[OneLineParser, argparse.Namespace]:
    """The parser, for what else is to be refused, and what was typed, sound in itself."""
    parser = OneLineParser("python -m pallas_kernels.check", __doc__)
    names = list(dict.fromkeys(name for impls in PLATFORMS.values() for name in impls))
    parser.add_argument("operation", nargs="*", help=f"{', '.join(PLATFORMS)} (default: all)")
    parser.add_argument("--impl", help=f"{', '.join(names)} (default: this platform's kernels)")
    parser.add_argument("--dtype", default="bfloat16", help="or float32 (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=child.TIMEOUT_S, metavar="S",
                        help="seconds for each (default: %(default)g)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="though there is a verdict on file")
    args = parser.parse_args(argv)
    for name in args.operation:
        parser.check_choice("operation", name, PLATFORMS)
    parser.check_choice("--impl", args.impl, names)
    parser.check_choice("--dtype", args.dtype, ("bfloat16", "float32"))
    if not args.timeout > 0:
        parser.error(f"--timeout must be above 0; got {args.timeout:g}. Type --timeout 600.")
    args.asked = [
        (operation, impl)
        for operation in args.operation or PLATFORMS
        for impl in PLATFORMS[operation]
        if impl == args.impl or (args.impl is None and impl not in PLAIN)
    ]
    if not args.asked:
        parser.error(f"{' and '.join(args.operation)} must have --impl {args.impl}, and has not.")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser, args = arguments(argv)
    try:
        here = child.chip() if may_have_a_chip() or args.impl in PLAIN else {"platform": "cpu"}
    except child.NoChip as error:
        parser.error(f"the chip must be free for a check: {error}.")
    able = [(o, i) for o, i in args.asked if here["platform"] in PLATFORMS[o][i]]
    if not able:
        parser.error(f"a kernel needs its chip, and this is a {here['platform']}. Nothing to check "
                     "here; --impl xla checks the plain implementation.")  # fmt: skip
    judge = judge_here(here, args.dtype, {}, timeout_s=args.timeout, again=args.again)
    print(f"{here['kind']}, jax {here['jax']}, {args.dtype}", flush=True)
    wrong = False
    for operation, impl in able:
        verdict = judge(operation, impl)
        wrong |= verdict.kind in ("wrong", "unknown")
        told = f"right, {verdict.reason}" if verdict.right else said(verdict)
        print(f"{operation:<17}{impl:<12}{told}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
