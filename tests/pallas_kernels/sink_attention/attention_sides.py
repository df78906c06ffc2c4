# SPDX-License-Identifier: Apache-2.0
"""Every implementation of sink attention as one callable, for properties and planted faults.

Blocks are so small that short rows take every path."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import (
    cases,
    pallas_gpu,
    pallas_tpu,
    pallas_tpu_blocks,
    reference,
    xla,
)
from pallas_kernels.sink_attention.hopper import pallas_gpu_backward, pallas_gpu_blocks
from pallas_kernels.sink_attention.hopper.pallas_gpu_blocks import MosaicTiles
from pallas_kernels.sink_attention.triton_kernels import jax_triton_call
from tests.pallas_kernels.sink_attention import attention_oracle as oracle
from tests.pallas_kernels.sink_attention import triton_interpreted

# No length is a multiple of a block; queries and keys differ in number, heads in every way.
CASE = cases.AttentionCase("side", 2, 45, 61, 6, 2, 16, 9)


class Side(NamedTuple):
    """An implementation: its function, its inputs, and the modules that hold its parts."""

    name: str
    case: cases.AttentionCase
    dtype: Any
    attend: Callable[..., Any]  # of window, then the arrays of `cases.Inputs`
    blocks: Any  # the module that holds its `block_table`
    predicate: Any  # the module that holds its `is_visible`; None for Triton, which has its own
    unseen: Any  # (module, name) of the constants that are scores of invisible keys

    def run(self, dout: Any, dlse: Any, *inputs: Any, window: int | None = None) -> Any:
        """o, lse, dq, dk, dv, dsink."""
        window = self.case.window if window is None else window
        return oracle.values_and_gradients(self.attend, window, dout, dlse, *inputs)

    def forward(self, *inputs: Any, window: int | None = None) -> Any:
        """o and lse, from the same program."""
        q = inputs[0]
        return self.run(jnp.zeros_like(q), jnp.zeros(q.shape[:3]), *inputs, window=window)[:2]


def of_positional(f: Callable[..., Any]) -> Callable[..., Any]:
    """A new function for each call, so that jit does not reuse a program with other blocks."""
    return lambda window, q, k, v, sink, *layout: f(
        q, k, v, sink, Layout(*layout), window, q.shape[3] ** -0.5
    )


def with_xla(patch: pytest.MonkeyPatch) -> Side:
    patch.setattr(xla, "xla_block_sizes", lambda *_: (8, 8))
    return Side(
        "xla",
        CASE,
        jnp.float32,
        of_positional(xla.sink_attention_xla),
        xla,
        xla,
        ((xla, "UNSEEN"),),
    )


def with_reference(_: pytest.MonkeyPatch) -> Side:
    f = of_positional(reference.sink_attention_reference)
    return Side("reference", CASE, jnp.float32, f, None, reference, ((reference, "UNSEEN"),))


def with_tpu(patch: pytest.MonkeyPatch) -> Side:
    patch.setattr(pallas_tpu_blocks, "tpu_block_sizes", lambda *_: (16, 8, 8))
    f = of_positional(partial(pallas_tpu.sink_attention_mosaic_tpu, interpret=True))
    blocks = pallas_tpu_blocks
    return Side(
        "mosaic_tpu",
        CASE,
        jnp.float32,
        f,
        blocks,
        blocks,
        ((blocks, "UNSEEN"), (pallas_tpu, "UNSEEN")),
    )


def with_gpu(patch: pytest.MonkeyPatch) -> Side:
    if jax.__version_info__ < (0, 11):
        pytest.skip("jax 0.10 takes 10 seconds to interpret one block")
    for module, name, consumers in (
        (pallas_gpu, "mosaic_forward_tiles", 4),
        (pallas_gpu_backward, "mosaic_dq_tiles", 2),
    ):

        def tiles(_, __, G, consumers=consumers):
            return MosaicTiles(consumers, 32, 2, heads=1 + (G % 2 == 0))  # a key head's own

        patch.setattr(module, name, tiles)
    patch.setattr(pallas_gpu_backward, "mosaic_dkv_tiles", lambda *_: MosaicTiles(1, 32, 3))
    f = of_positional(partial(pallas_gpu.sink_attention_mosaic_gpu, interpret=True))
    case = CASE._replace(N=2, K=1, H=64)
    return Side(
        "mosaic_gpu",
        case,
        jnp.bfloat16,
        f,
        pallas_gpu_blocks,
        pallas_gpu_blocks,
        ((pallas_gpu, "UNSEEN"),),
    )


LARGE_SCORE = 5000.0


def far_below(inputs: Any) -> Any:
    """Inputs whose scores are about −LARGE_SCORE, and +LARGE_SCORE for keys of another segment.

    Sinks are near −LARGE_SCORE or −inf.
    """
    sizes = {"q": -128.0, "k": LARGE_SCORE / 128 * inputs.q_BTNH.shape[3] ** 0.5}

    def moved(x, segments, size):
        sign = jnp.where(segments % 2 == 1, size, -size).astype(x.dtype)
        return x.at[..., 0].set(sign[:, :, None])

    sinks = [-jnp.inf if n % 3 == 0 else -LARGE_SCORE - n for n in range(inputs.sink_N.size)]
    return inputs._replace(
        q_BTNH=moved(inputs.q_BTNH, inputs.q_segment_ids_BT, sizes["q"]),
        k_BSKH=moved(inputs.k_BSKH, inputs.k_segment_ids_BS, sizes["k"]),
        sink_N=jnp.asarray(sinks, jnp.float32),
    )


@contextlib.contextmanager
def opened(name: str):
    """The side of that name; skips with the reason where it cannot be interpreted here."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "triton":
            with triton_interpreted.interpreted() as kernels:
                f = triton_interpreted.from_jax(kernels, patch)
                call = jax_triton_call
                low = ((kernels, "LOW"),)
                yield Side("triton", CASE, jnp.float32, f, call, None, low)
        else:
            yield SIDES[name](patch)


SIDES: dict[str, Any] = {
    "reference": with_reference,
    "xla": with_xla,
    "mosaic_tpu": with_tpu,
    "mosaic_gpu": with_gpu,
    "triton": None,
}
