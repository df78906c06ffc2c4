# SPDX-License-Identifier: Apache-2.0
"""Sink attention on a TPU by blocks: which of them libtpu's own schedule makes the fastest.

    JAX_PLATFORMS=cpu python -m benchmarks.tpu_blocks v6e --window 0 --blocks 512x512x2 512x1024x2
    JAX_PLATFORMS=cpu python -m benchmarks.tpu_blocks v5p --window 128 --backward

Blocks are queries × keys × heads unrolled. Without a window: cycles of a whole block for 512 × 512
pairs of one head. With one: cycles a query and 8 heads, all of the kernel, and steps of so many
keys may start at any 128. Nothing is executed; waiting for memory is not in it.
`tpu_block_sizes` and `count_unrolled_heads` in pallas_tpu_blocks.py hold what this has found.
"""

import argparse
import sys

from benchmarks.kernels import schedule
from pallas_kernels.ahead_of_time import TPUS
from pallas_kernels.bench import schedule_tpu
from pallas_kernels.sink_attention import cases
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks

WHOLE = (
    "512x512x2",
    "512x512x4",
    "512x1024x4",
    "1024x512x4",
    "1024x1024x2",
    "1024x1024x4",
    "2048x512x2",
)
WINDOW = (
    "256x384x2",
    "256x384x4",
    "256x384x8",
    "512x640x2",
    "512x640x4",
    "128x256x4",
    "128x256x8",
    "512x256x4",
    "256x128x8",
)


def programs(sizes: str, window: str, backward: str) -> list[schedule.Program]:
    """One pass with these blocks; called in a process of its own."""
    bt, bs, heads = map(int, sizes.split("x"))
    unit = blocks.LANES if int(window) else bs
    blocks.tpu_block_sizes = lambda *_, **__: (bt, bs, unit)
    blocks.count_unrolled_heads = lambda *_: heads
    name = "window_20b" if int(window) else "full_120b"
    assert cases.get_attention_case(name).window == int(window)
    forward, both = schedule.make_programs("sink_attention", name, "bfloat16")
    return [both if backward == "True" else forward]


def main() -> None:
    """Print a row for each choice, as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chip", choices=TPUS)
    parser.add_argument("--window", type=int, choices=(0, 128), default=0)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--blocks", nargs="+", help="queries x keys x heads")
    args = parser.parse_args()
    for sizes in args.blocks or (WINDOW if args.window else WHOLE):
        words = (sizes, str(args.window), str(args.backward))
        try:
            found = schedule.compile_in_child(args.chip, "benchmarks.tpu_blocks:programs", *words)
        except (RuntimeError, ValueError) as error:
            print(f"{args.chip} {sizes}: refused: {error}", flush=True)
            continue
        row = []
        for kernel in found.kernels:
            name = next(x for x in ("forward", "backward", "") if x in kernel.kernel)
            counted = found.find_counts(kernel.kernel)
            row.append(f"{name} {cost(args.chip, args.window, sizes, kernel, counted)}")
        print(f"{args.chip} {sizes}: " + ", ".join(row), flush=True)


def cost(chip, window, sizes, kernel: schedule_tpu.TpuSchedule, counted) -> str:
    """Cycles, and the share of the matrix unit in the first main loop."""
    bt, bs, heads = map(int, sizes.split("x"))
    loop = kernel.main_loops()[0]
    if not window:
        cycles = kernel.cycles(loop) / heads / (bt * bs) * 512**2
        ms = kernel.ms(counted, chip)
        time = "" if ms is None else f", {ms:.2f} ms"
        return f"{cycles:.0f} ({kernel.share(loop, 'MXU'):.0%} MXU{time})"
    ms = kernel.ms(counted, chip)
    if ms is None:
        return "loops not those counted"
    case = cases.get_attention_case("window_20b")
    cores = 2 if chip == "v5p" else 1
    return f"{ms * 1e6 * schedule_tpu.GHZ[chip] * cores / (case.T * case.K):.1f}"


if __name__ == "__main__":
    sys.exit(main())
