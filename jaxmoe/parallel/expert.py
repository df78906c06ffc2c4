# SPDX-License-Identifier: Apache-2.0
"""Experts sharded over devices: each holds some, and every token reaches its own, dropless.

There are two dispatches of the same sum. Both are local functions for `jax.shard_map` with the
arguments of `apply_experts` (jaxmoe/model/moe/experts.py), and run that function on the rows of
this device: a row is passed as a token with one active expert, of weight 1.

    experts_all_gather  every device sees all tokens and sums its own experts' outputs
    experts_all_to_all  a row travels to the device of its expert and back

Experts are sharded over (*axes, *sum_axes), major first; tokens are sharded over `axes` and
replicated along `sum_axes`. Rows go through a buffer of fixed size; rows that do not fit go in a
further round (rounds.py), so no routing is refused and none takes more memory than another.
Next: pairs.py and exchange.py, how rows get there.
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.moe.experts import apply_experts
from jaxmoe.parallel.exchange import (
    Counts,
    Exchange,
    count_exchanged_rows,
    device_index,
    exchange_rows,
    round_slices,
    row_experts,
)
from jaxmoe.parallel.gather import gather_param
from jaxmoe.parallel.pairs import Pairs, combine_rows_of_pairs, gather_rows, select_pairs
from jaxmoe.parallel.rounds import map_parts, sum_rounds
from jaxmoe.parallel.scatter import reduce_scatter
from jaxmoe.parallel.sharding import Names
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul.routing import sort_by_expert

_log = logging.getLogger("jaxmoe.parallel")

CAPACITY_FACTOR = 2  # rows of the buffer, as a multiple of a device's rows under balanced routing
MAX_GATHERED_BYTES = 2**29  # of the tokens of all devices, in float32
MAX_V5E_CHIPS = 16  # the compiler accepts a ragged all-to-all on 4x4 chips and refuses it on 8x8


def experts_all_gather(
    h_btD: Float[Array, "b t D"],
    indices_btA: Int[Array, "b t A"],
    weights_btA: Float[Array, "b t A"],
    layer: Params,
    cfg: ModelConfig,
    *,
    axes: Names = ("expert",),
    sum_axes: Names = ("tensor",),
    experts: Callable[..., Array] = apply_experts,
    buffer_rows: int | None = None,
) -> Float[Array, "b t D"]:
    """Return Σ_a weight_a · expert_a(h): tokens all-gathered over `axes`, sums reduce-scattered.

    Memory: h and the float32 sum of the tokens of all shards, cut into parts where that sum has
    more than MAX_GATHERED_BYTES; and `buffer_rows` rows, by default CAPACITY_FACTOR times the
    balanced load, whatever the number of shards.

    Numerics: the sum over experts is float32 on a device and over devices, and rounds once. h's
    gradient is rounded on each device and summed over them in float32.
    """
    active, width = indices_btA.shape[-1], h_btD.shape[-1]
    run_part = partial(
        _all_gather_part,
        cfg=cfg,
        axes=axes,
        sum_axes=sum_axes,
        experts=experts,
        buffer_rows=buffer_rows,
    )
    h_MD, weights_MA = h_btD.reshape(-1, width), weights_btA.reshape(-1, active)
    indices_MA = indices_btA.reshape(-1, active)
    n_parts = min(-(-_axis_size(axes) * h_MD.size * 4 // MAX_GATHERED_BYTES), h_MD.shape[0])
    if n_parts <= 1:
        return jnp.reshape(run_part((h_MD, weights_MA), layer, indices_MA), h_btD.shape)
    # The padding of the last part belongs to no expert.
    tokens = _split_parts(h_MD, n_parts), _split_parts(weights_MA, n_parts)
    y_PMD = map_parts(run_part, tokens, layer, _split_parts(indices_MA, n_parts, -1))
    return _join_parts(y_PMD, h_MD.shape[0]).reshape(h_btD.shape)


def _all_gather_part(tokens, layer, indices_MA, *, cfg, axes, sum_axes, experts, buffer_rows):
    """Compute one part of `experts_all_gather`."""
    h_MD, weights_MA = tokens
    active = indices_MA.shape[1]
    # gather_param, unlike lax.all_gather, sums the gradients of the tokens in float32.
    h_ND = gather_param(h_MD, (axes, ()), h_MD.dtype)
    weights_NA = gather_param(weights_MA, (axes, ()), jnp.float32)
    indices_NA = lax.all_gather(indices_MA, axes, tiled=True) if axes else indices_MA
    n_local = cfg.n_experts // _axis_size((*axes, *sum_axes))
    local_NA = indices_NA - device_index((*axes, *sum_axes)) * n_local
    is_local_NA = (local_NA >= 0) & (local_NA < n_local)
    # One group, that of this device, is enough: rows of other devices are sorted to the end, and
    # apply_experts sorts the remaining ones by expert.
    order, inverse, (count,) = sort_by_expert(jnp.where(is_local_NA, 0, 1), 1)
    rows = _buffer_size(indices_MA.size, axes, sum_axes, buffer_rows)
    run_local = partial(
        _run_local_experts,
        experts=experts,
        cfg=replace(cfg, n_experts=n_local, experts_per_token=1),
    )

    def run_round(k: Array, operands: Leaf, constants: Leaf) -> Array:
        h_ND, weights_NA, layer = operands
        order, inverse_NA, local_S, count = constants
        pairs = select_pairs(order, inverse_NA, count, k * rows, rows)
        # Expert −1 marks rows without a pair, whose outputs are 0.
        is_filled_C = k * rows + jnp.arange(rows, dtype=jnp.int32) < count
        local_C = jnp.where(is_filled_C, local_S[pairs.pair_C], -1)
        return combine_rows_of_pairs(
            run_local(gather_rows(h_ND, pairs), local_C, layer), weights_NA, pairs
        )

    constants = order, inverse.reshape(-1, active), local_NA.reshape(-1), count
    sum_ND = sum_rounds(run_round, _count_rounds(count, rows), (h_ND, weights_NA, layer), constants)
    return sum_shares(sum_ND, axes, sum_axes, h_MD.dtype)


def experts_all_to_all(
    h_btD: Float[Array, "b t D"],
    indices_btA: Int[Array, "b t A"],
    weights_btA: Float[Array, "b t A"],
    layer: Params,
    cfg: ModelConfig,
    *,
    axes: Names = ("expert",),
    sum_axes: Names = ("tensor",),
    experts: Callable[..., Array] = apply_experts,
    buffer_rows: int | None = None,
    exchange: Exchange | None = None,
) -> Float[Array, "b t D"]:
    """Return Σ_a weight_a · expert_a(h): each row travels to its expert's device and back.

    Memory: b·t·A rows of this device and `buffer_rows` of others, by default CAPACITY_FACTOR times
    the balanced load, whatever the number of shards. Devices along `sum_axes` have the same tokens:
    each sends another part of the rows, and only to devices with its own index in `sum_axes`.

    Args:
        exchange: like jax.lax.ragged_all_to_all over `axes`, which is the default.
    Numerics: rows travel in h's dtype, in which they are computed; the sum over experts is float32
    in top-k order, then over `sum_axes`, and rounds once.
    """
    active, width = indices_btA.shape[-1], h_btD.shape[-1]
    exchange = partial(lax.ragged_all_to_all, axis_name=axes) if exchange is None else exchange
    n_shards, n_sums = _axis_size(axes), _axis_size(sum_axes)
    n_local = cfg.n_experts // (n_shards * n_sums)
    indices_MA = indices_btA.reshape(-1, active)
    owner_MA, local_MA = indices_MA // n_local, indices_MA % n_local
    is_sent_MA = owner_MA % n_sums == device_index(sum_axes)
    # Groups in the order of receivers make the rows for one device contiguous, as a ragged
    # all-to-all needs.
    group_MA = jnp.where(is_sent_MA, owner_MA // n_sums * n_local + local_MA, -1)
    order, inverse, sizes = sort_by_expert(group_MA, n_shards * n_local)
    pairs = Pairs(order, inverse.reshape(-1, active))
    counts = count_exchanged_rows(sizes.reshape(n_shards, n_local), axes)
    rows = _buffer_size(indices_MA.size, axes, sum_axes, buffer_rows)
    run_local = partial(
        _run_local_experts,
        experts=experts,
        cfg=replace(cfg, n_experts=n_local, experts_per_token=1),
    )

    def run_round(k: Array, operands: Leaf, counts: Counts) -> Array:
        x_SD, layer = operands
        outgoing, returning = round_slices(counts, k * rows, rows)
        x_RD = exchange_rows(exchange, rows, x_SD, outgoing, returning)
        y_RD = run_local(x_RD, row_experts(counts, k * rows, rows, n_local), layer)
        return exchange_rows(exchange, x_SD.shape[0], y_RD, returning, outgoing)

    # All devices of the mesh must run the same number of rounds, since they run one program in
    # step.
    rounds = lax.pmax(
        _count_rounds(counts.max_inflow, rows), jax.sharding.get_abstract_mesh().axis_names
    )
    x_SD = gather_rows(h_btD.reshape(-1, width), pairs)
    y_SD = sum_rounds(run_round, rounds, (x_SD, layer), counts)
    sum_MD = combine_rows_of_pairs(y_SD, weights_btA.reshape(-1, active), pairs)
    return jnp.reshape(sum_shares(sum_MD, (), sum_axes, h_btD.dtype), h_btD.shape)


def choose_dispatch(
    device: Target, *, devices: int, shards: int, active: int, decoding: bool
) -> tuple[Callable[..., Array], str]:
    """Return the dispatch for this accelerator and mesh, and the reason, which is logged once.

    `shards` is the number of parts that tokens and experts are both sharded into; `decoding` is
    True for the few tokens of a decode step.
    """
    is_v5e = any(name in device.kind for name in ("v5 lite", "v5e"))
    # Bytes per element of a token, with 2-byte rows: all-gather sends it to n − 1 shards and gets
    # float32 sums back, 6(n − 1); all-to-all sends the share (n − 1)/n of A rows, both ways,
    # 4A(n − 1)/n.
    gather_is_smaller = 6 * shards <= 4 * active
    dispatch = experts_all_gather
    if device.platform == "cpu":
        reason = "XLA has no ragged all-to-all for a CPU"
    elif is_v5e and devices > MAX_V5E_CHIPS:
        reason = f"a v5e of more than {MAX_V5E_CHIPS} chips has no ragged all-to-all"
    elif decoding:
        reason = "the few tokens of a decode step travel once instead of twice"
    elif gather_is_smaller:
        reason = f"tokens to {shards} shards are fewer bytes than {active} rows there and back"
    else:
        dispatch = experts_all_to_all
        reason = f"{active} rows there and back are fewer bytes than tokens to {shards} shards"
    _log_once(f"{dispatch.__name__} on {device.platform}: {reason}")
    return dispatch, reason


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def sum_shares(
    share_ND: Float[Array, "N D"], axes: Names, sum_axes: Names, dtype: DTypeLike
) -> Float[Array, "M D"]:
    """Sum the shares of all devices in float32; each device keeps its own tokens, rounded once.

    Backward: the gradient of all tokens is gathered on every device, in `dtype`.
    """
    if axes:
        share_ND = reduce_scatter(share_ND, axes, dim=0)
    return _psum_over(share_ND, sum_axes).astype(dtype)


def _sum_shares_forward(share_ND, axes, sum_axes, dtype):
    return sum_shares(share_ND, axes, sum_axes, dtype), None


def _sum_shares_backward(axes, sum_axes, dtype, _, dout_MD):
    # The result is replicated along sum_axes. shard_map divides its gradient among those devices,
    # so the parts are summed first.
    dout_MD = _psum_over(dout_MD.astype(jnp.float32), sum_axes).astype(dtype)
    if axes:
        dout_MD = lax.all_gather(dout_MD, axes, tiled=True)
    return (dout_MD.astype(jnp.float32),)


sum_shares.defvjp(_sum_shares_forward, _sum_shares_backward)


def _run_local_experts(rows_CD, local_C, layer, *, experts, cfg):
    """Return the outputs of this device's experts for these rows; 0 where the expert is −1."""
    weight_1C1 = jnp.ones((1, rows_CD.shape[0], 1), jnp.float32)
    return experts(rows_CD[None], local_C[None, :, None], weight_1C1, layer, cfg)[0]


def _buffer_size(n_pairs, axes, sum_axes, buffer_rows):
    """Return the buffer's rows for `n_pairs` pairs on each device; at most all rows."""
    return min(
        buffer_rows or -(-CAPACITY_FACTOR * n_pairs // _axis_size(sum_axes)),
        n_pairs * _axis_size(axes),
    )


def _split_parts(x_MX, n_parts, filler=0):
    """Cut [M, X] into [parts, M/parts, X], padded at the end with `filler`."""
    n_padding = -x_MX.shape[0] % n_parts
    x_MX = jnp.pad(x_MX, ((0, n_padding), (0, 0)), constant_values=filler)
    return x_MX.reshape(n_parts, -1, x_MX.shape[1])


def _join_parts(y_PMD, rows):
    return y_PMD.reshape(-1, y_PMD.shape[2])[:rows]


def _count_rounds(count, rows):
    return (count + rows - 1) // rows


def _axis_size(names: Names) -> int:
    return math.prod(lax.axis_size(name) for name in names)


def _psum_over(x: Array, names: Names) -> Array:
    return lax.psum(x, names) if names else x


@functools.lru_cache(maxsize=64)
def _log_once(message: str) -> None:
    _log.info(message)
