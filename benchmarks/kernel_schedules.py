# SPDX-License-Identifier: Apache-2.0
"""JAX's own kernels beside ours, by the compilers' schedules: nothing is executed.

    JAX_PLATFORMS=cpu python -m benchmarks.kernel_schedules v6e
    JAX_PLATFORMS=cpu python -m benchmarks.kernel_schedules h200

On a TPU: splash attention at GPT-OSS' heads and 8,192 tokens, forward and backward, and megablox at
the sizes of gate and up; cycles of the main loop for 512 × 512 pairs of one head, and for 512 rows
by 256 columns of 2880. On Hopper: attention_mgpu (causal forward; its backward has no causal form),
cycles of each pipe for 64 × 128 pairs. Peers' blocks: the best of a few that were tried.
splash has no sink here, attention_mgpu neither; megablox no bias and no activation.
"""

import argparse
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import schedule, schedule_hopper
from benchmarks.kernels.schedule import Program
from pallas_kernels.ahead_of_time import TPUS
from pallas_kernels.bench import schedule_tpu

S = jax.ShapeDtypeStruct
TOKENS, HEADS, KEY_HEADS, SIZE = 8192, 64, 8, 64


def both(fn: Any) -> Any:
    """(outputs, gradients) of all arguments."""

    def run(*x: Any) -> Any:
        out, pull = jax.vjp(fn, *x)
        return out, pull(jnp.ones_like(out))

    return run


def splash(block: str, fused: str) -> list[Program]:
    """JAX's splash attention with square blocks; its backward in two kernels or one."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    b, one = int(block), fused == "fused"
    sizes = kernel.BlockSizes(
        block_q=b,
        block_kv=b,
        block_kv_compute=b,
        block_q_dkv=b,
        block_kv_dkv=b,
        block_kv_dkv_compute=b,
        block_q_dq=None if one else b,
        block_kv_dq=None if one else b,
        use_fused_bwd_kernel=one,
    )
    G = HEADS // KEY_HEADS
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * G)
    attend = kernel.make_splash_mqa_single_device(mask, block_sizes=sizes)
    keys = S((KEY_HEADS, TOKENS, SIZE), jnp.bfloat16)
    q = S((KEY_HEADS, G, TOKENS, SIZE), jnp.bfloat16)
    return [Program(both(jax.vmap(attend)), (q, keys, keys))]


def megablox(rows: str, columns: str) -> list[Program]:
    """JAX's grouped matmul, the whole width in one product."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    tiling = (int(rows), 2880, int(columns))
    x, w = S((32768, 2880), jnp.bfloat16), S((32, 2880, 5760), jnp.bfloat16)
    fn = partial(gmm, tiling=tiling, preferred_element_type=jnp.bfloat16)
    return [Program(fn, (x, w, S((32,), jnp.int32)))]


def attention_mgpu(causal: str) -> list[Program]:
    """JAX's attention for Hopper; float16, as it takes."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as peer

    setattr(peer, "cuda_versions", SimpleNamespace(cuda_runtime_get_version=lambda: 13000))  # noqa: B010
    config = peer.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=causal == "causal"
    )
    q, k = (S((1, TOKENS, n, SIZE), jnp.float16) for n in (HEADS, KEY_HEADS))
    return [Program(partial(peer.attention, config=config), (q, k, k))]


PEERS = {  # words for each function, and what one turn of a main loop is of the unit of the table
    "splash": (("512", "two"), ("1024", "two"), ("1024", "fused")),
    "megablox": (("512", "640"), ("512", "1152")),
}


def rows_of(chip: str, name: str, words: tuple[str, ...]) -> list[str]:
    """A line for each of the peer's kernels."""
    try:
        found = schedule.compile_in_child(chip, f"benchmarks.kernel_schedules:{name}", *words)
    except (RuntimeError, ValueError) as error:
        return [f"{name} {' '.join(words)}: refused: {error}"]
    if chip not in TPUS:
        return [
            line
            for kernel in found.kernels
            for line in schedule_hopper.format_hopper_kernel(name, kernel)
        ]
    lines = []
    for kernel in found.kernels:
        loop = max(schedule_tpu.walk_loops(kernel.body), key=lambda x: kernel.slots(x[0], "MXU"))[0]
        turn = [int(x) for x in words if x.isdigit()]
        if name == "splash":
            unit, count = "512 x 512", turn[0] ** 2 / 512**2
        else:
            unit, count = "512 x 256 columns", turn[0] * turn[1] / (512 * 256)
        cycles = kernel.cycles(loop) / count
        lines.append(
            f"{name} {' '.join(words)}  {kernel.kernel}: {cycles:.0f} cycles of {unit}, "
            f"{kernel.share(loop, 'MXU'):.0%} MXU"
        )
    return lines


def main() -> None:
    """Print the peers' rows as they come, then the command for ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chip", choices=schedule.IMPL)
    args = parser.parse_args()
    peers = PEERS if args.chip in TPUS else {"attention_mgpu": (("causal",), ("full",))}
    for name, choices in peers.items():
        for words in choices:
            print("\n".join(rows_of(args.chip, name, words)), flush=True)
    print(f"ours: python -m benchmarks.kernels OP --compile {args.chip} --schedule")


if __name__ == "__main__":
    sys.exit(main())
