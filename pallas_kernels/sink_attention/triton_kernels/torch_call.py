# SPDX-License-Identifier: Apache-2.0
"""Sink attention for torch tensors: the kernel, tiles and order of tiles that JAX runs.

For a rollout engine in torch that is to agree with this trainer in every bit: prefill, extend and
decode all go through this one function, and none of them splits its keys. Keep the slots of a
cache in the order of positions, from slot 0: a row's bits depend on which keys share a block. What
is not yet filled is in segment 0 and finite (allocate zeros, for 0·NaN is NaN). Forward only.
torch is not imported, as tensors bring their methods. Next: triton_kernel.py.
"""

import math
from typing import Any

from pallas_kernels.arguments import window_size
from pallas_kernels.sink_attention.common import check, same_batch
from pallas_kernels.sink_attention.triton_kernels import triton_launch as launch


def sink_attention_torch(
    q_BTNH: Any,
    k_BSKH: Any,
    v_BSKH: Any,
    sink_N: Any,
    *,
    q_positions_BT: Any,
    k_positions_BS: Any,
    q_segment_ids_BT: Any,
    k_segment_ids_BS: Any,
    window: int | None = None,
    scale: float | None = None,
    blocks: Any = None,
) -> tuple[Any, Any]:
    """(o, lse) as `sink_attention` gives them; q, k and v may be strided views, as of a cache.

    Args:
        blocks: what `blocks_to_visit` returned for these positions, segments and window; layers
            of one step can share it.
    Raises: NotImplementedError without triton or for other head sizes; ValueError for shapes and
        strides that do not fit.
    """
    check(q_BTNH, k_BSKH, v_BSKH, sink_N)
    window = window_size(window)
    same_batch(q_BTNH, k_BSKH)
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    dtype = str(q_BTNH.dtype).removeprefix("torch.")
    reason = launch.missing("triton") or launch.unsupported(H, dtype)
    if reason:
        raise NotImplementedError(f"the Triton kernel cannot run here: {reason}.")
    scale = 1.0 / math.sqrt(H) if scale is None else scale
    if scale <= 0:
        raise ValueError(f"scale must be positive; got {scale}. Turn the sign of q instead.")
    if any(x.stride(3) != 1 for x in (q_BTNH, k_BSKH, v_BSKH)):
        raise ValueError("the head size must be the fastest axis. Call .contiguous().")

    from pallas_kernels.sink_attention.triton_kernels import triton_kernel

    G, tiles = N // K, launch.forward_tiles(H, q_BTNH.element_size())
    places = [
        x.int().contiguous()
        for x in (q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    ]
    if blocks is None:
        blocks = blocks_to_visit(*places, group=G, head_size=H, itemsize=q_BTNH.element_size(),
                                 window=window)  # fmt: skip
    sink = sink_N.float().contiguous()
    o, lse = q_BTNH.new_empty((B, T, N, H)), sink.new_empty((B, T, N))
    strides = launch.strides(*(x.stride()[:3] for x in (q_BTNH, k_BSKH, v_BSKH)))
    kernel: Any = triton_kernel.forward_kernel
    kernel[(blocks.shape[1], B * K)](
        q_BTNH, k_BSKH, v_BSKH, sink, *places, blocks, *launch.lengths(T, S), *strides, o, lse,
        **launch.constants(K, G, H, window, scale, tiles),
        num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return o, lse


def blocks_to_visit(
    q_positions_BT: Any,
    k_positions_BS: Any,
    q_segment_ids_BT: Any,
    k_segment_ids_BS: Any,
    *,
    group: int,
    head_size: int,
    itemsize: int,
    window: int | None = None,
) -> Any:
    """[B, tiles, 4], as `pallas_kernels.blocks.runs` has them, with every block masked.

    Which blocks are visited changes no bit as long as none with a visible key is left out.
    """
    tiles = launch.forward_tiles(head_size, itemsize)

    def bounds(x, segments, size, repeat=1):
        """Least and greatest value per block, of what is not padding; [B, blocks]."""
        x, segments = (y.repeat_interleave(repeat, 1) for y in (x.int(), segments.int()))
        B, length = x.shape
        count = launch.blocks(length, size)
        big = 2**31 - 1
        low, high = (x.new_full((B, count * size), y) for y in (big, -big))
        low[:, :length] = x.masked_fill(segments <= 0, big)
        high[:, :length] = x.masked_fill(segments <= 0, -big)
        return low.view(B, count, size).amin(2), high.view(B, count, size).amax(2)

    q, k = (q_positions_BT, q_segment_ids_BT), (k_positions_BS, k_segment_ids_BS)
    (q_low, q_high), (qs_low, qs_high) = (bounds(x, q[1], tiles.rows, group) for x in q)
    (k_low, k_high), (ks_low, ks_high) = (bounds(x, k[1], tiles.keys) for x in k)
    needed = k_low[:, None] <= q_high[:, :, None]
    needed &= (ks_low[:, None] <= qs_high[:, :, None]) & (qs_low[:, :, None] <= ks_high[:, None])
    if window:
        needed &= q_low[:, :, None] - window < k_high[:, None]
    some, needed = needed.any(2), needed.int()
    first = needed.argmax(2) * some
    last = (needed.shape[2] - needed.flip(2).argmax(2)) * some
    table = first.new_empty((*first.shape, 4))
    table[:, :, 0], table[:, :, 1:] = first, last[:, :, None]
    return table.int()
