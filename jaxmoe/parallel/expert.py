# SPDX-License-Identifier: Apache-2.0
"""The experts cut over devices: each holds some, and every token gets to its own, dropless.

Two dispatches of the same sum, local functions for `jax.shard_map` with the arguments of
jaxmoe.model.experts.experts, of which each runs the one-device function on the rows that are this
device's: a row is to it a token with one active expert, of weight 1.

    gathered_experts   everybody sees all tokens and adds up what its own experts say of them
    exchanged_experts  a row travels to the device of its expert and back

Experts lie over (*over, *sum_over), major first; tokens are cut by `over` and whole along
`sum_over`. Rows go through a buffer of fixed size; what does not fit goes in a further round
(rounds.py), so no routing is refused and none takes more memory than another.
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
from jaxmoe.model.experts import experts as one_device
from jaxmoe.parallel.exchange import (
    Counts,
    Exchange,
    counted,
    experts_of,
    place_in,
    travelled,
    ways,
)
from jaxmoe.parallel.gather import gathered
from jaxmoe.parallel.pairs import Pairs, rows_of, sum_of, window
from jaxmoe.parallel.rounds import in_parts, in_rounds
from jaxmoe.parallel.scatter import sum_scattered
from jaxmoe.parallel.sharding import Names
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul.routing import sort_by_expert

_log = logging.getLogger("jaxmoe.parallel")

ROOM = 2  # rows of a buffer, over those of a device where all experts are asked alike
GATHERED = 2**29  # bytes of all devices' tokens at once, in float32
V5E_CHIPS = 16  # of a v5e slice: 4x4 compiles a ragged all-to-all, 8x8 is refused


def gathered_experts(
    h_btD: Float[Array, "b t D"],
    indices_btA: Int[Array, "b t A"],
    weights_btA: Float[Array, "b t A"],
    layer: Params,
    cfg: ModelConfig,
    *,
    over: Names = ("expert",),
    sum_over: Names = ("tensor",),
    experts: Callable[..., Array] = one_device,
    buffer_rows: int | None = None,
) -> Float[Array, "b t D"]:
    """Σ_a weight_a · expert_a(h): tokens all-gathered over `over`, sums reduce-scattered.

    Holds h and the float32 sum of all n·b·t tokens of n shards, or, where that sum has more than
    GATHERED bytes, of as many of them at a time as have not; and rows of `buffer_rows` pairs, by
    default ROOM times the balanced load, whatever n.

    Numerics: the sum over experts is float32 on a device and over devices, and rounds once. h's
    gradient is rounded on each device and summed over them in float32.
    """
    active, width = indices_btA.shape[-1], h_btD.shape[-1]
    some = partial(
        _gathered, cfg=cfg, over=over, sum_over=sum_over, experts=experts, wanted=buffer_rows
    )
    h_MD, weights_MA = h_btD.reshape(-1, width), weights_btA.reshape(-1, active)
    indices_MA = indices_btA.reshape(-1, active)
    parts = min(-(-_size(over) * h_MD.size * 4 // GATHERED), h_MD.shape[0])
    if parts <= 1:
        return jnp.reshape(some((h_MD, weights_MA), layer, indices_MA), h_btD.shape)
    # what fills up the last part is nobody's
    tokens = _cut(h_MD, parts), _cut(weights_MA, parts)
    y_PMD = in_parts(some, tokens, layer, _cut(indices_MA, parts, -1))
    return _joined(y_PMD, h_MD.shape[0]).reshape(h_btD.shape)


def _gathered(tokens, layer, indices_MA, *, cfg, over, sum_over, experts, wanted):
    """One part of `gathered_experts`."""
    h_MD, weights_MA = tokens
    active = indices_MA.shape[1]
    h_ND = gathered(h_MD, (over, ()), h_MD.dtype)
    weights_NA = gathered(weights_MA, (over, ()), jnp.float32)
    indices_NA = lax.all_gather(indices_MA, over, tiled=True) if over else indices_MA
    n_local = cfg.n_experts // _size((*over, *sum_over))
    local_NA = indices_NA - place_in((*over, *sum_over)) * n_local
    own_NA = (local_NA >= 0) & (local_NA < n_local)
    order, inverse, (count,) = sort_by_expert(jnp.where(own_NA, 0, 1), 1)
    rows = _rows(indices_MA.size, over, sum_over, wanted)
    own = partial(_own, experts=experts, cfg=replace(cfg, n_experts=n_local, experts_per_token=1))

    def one(k: Array, operands: Leaf, where: Leaf) -> Array:
        h_ND, weights_NA, layer = operands
        order, inverse_NA, local_S, count = where
        pairs = window(order, inverse_NA, count, k * rows, rows)
        full_C = k * rows + jnp.arange(rows, dtype=jnp.int32) < count
        local_C = jnp.where(full_C, local_S[pairs.pair_C], -1)
        return sum_of(own(rows_of(h_ND, pairs), local_C, layer), weights_NA, pairs)

    where = order, inverse.reshape(-1, active), local_NA.reshape(-1), count
    sum_ND = in_rounds(one, _needed(count, rows), (h_ND, weights_NA, layer), where)
    return summed(sum_ND, over, sum_over, h_MD.dtype)


def exchanged_experts(
    h_btD: Float[Array, "b t D"],
    indices_btA: Int[Array, "b t A"],
    weights_btA: Float[Array, "b t A"],
    layer: Params,
    cfg: ModelConfig,
    *,
    over: Names = ("expert",),
    sum_over: Names = ("tensor",),
    experts: Callable[..., Array] = one_device,
    buffer_rows: int | None = None,
    exchange: Exchange | None = None,
) -> Float[Array, "b t D"]:
    """Σ_a weight_a · expert_a(h): each row to its expert's device and back.

    Holds b·t·A rows of its own and `buffer_rows` of others', by default ROOM times the balanced
    load, whatever the number of shards. A device sends only to those of its own place in
    `sum_over`, where the same tokens are: each of them sends another part of the rows.

    Args:
        exchange: as jax.lax.ragged_all_to_all over `over`, which is the default.
    Numerics: rows travel in h's dtype, in which they are computed; the sum over experts is float32
    in top-k order, then over `sum_over`, and rounds once.
    """
    active, width = indices_btA.shape[-1], h_btD.shape[-1]
    exchange = partial(lax.ragged_all_to_all, axis_name=over) if exchange is None else exchange
    n_shards, n_sums = _size(over), _size(sum_over)
    n_local = cfg.n_experts // (n_shards * n_sums)
    indices_MA = indices_btA.reshape(-1, active)
    owner_MA, local_MA = indices_MA // n_local, indices_MA % n_local
    mine_MA = owner_MA % n_sums == place_in(sum_over)
    group_MA = jnp.where(mine_MA, owner_MA // n_sums * n_local + local_MA, -1)
    order, inverse, sizes = sort_by_expert(group_MA, n_shards * n_local)
    sent = Pairs(order, inverse.reshape(-1, active))
    counts = counted(sizes.reshape(n_shards, n_local), over)
    rows = _rows(indices_MA.size, over, sum_over, buffer_rows)
    own = partial(_own, experts=experts, cfg=replace(cfg, n_experts=n_local, experts_per_token=1))

    def one(k: Array, operands: Leaf, counts: Counts) -> Array:
        x_SD, layer = operands
        there, back = ways(counts, k * rows, rows)
        x_RD = travelled(exchange, rows, x_SD, there, back)
        y_RD = own(x_RD, experts_of(counts, k * rows, rows, n_local), layer)
        return travelled(exchange, x_SD.shape[0], y_RD, back, there)

    # all devices of the mesh go through as many rounds: chips run one program in step
    rounds = lax.pmax(_needed(counts.inflow, rows), jax.sharding.get_abstract_mesh().axis_names)
    x_SD = rows_of(h_btD.reshape(-1, width), sent)
    y_SD = in_rounds(one, rounds, (x_SD, layer), counts)
    sum_MD = sum_of(y_SD, weights_btA.reshape(-1, active), sent)
    return jnp.reshape(summed(sum_MD, (), sum_over, h_btD.dtype), h_btD.shape)


def dispatch_for(
    here: Target, *, devices: int, shards: int, active: int, decoding: bool
) -> tuple[Callable[..., Array], str]:
    """Which of the two runs on this chip and mesh, and why; the reason is logged, once.

    `shards`: parts that tokens and experts are cut into together; `decoding`: few tokens.
    """
    v5e = any(name in here.kind for name in ("v5 lite", "v5e"))
    # bytes of a token in 2-byte rows: to n − 1 shards, and float32 sums back, 6(n − 1); of A rows
    # the part (n − 1)/n each way, 4A(n − 1)/n
    fewer = 6 * shards <= 4 * active
    dispatch = gathered_experts
    if here.platform == "cpu":
        reason = "XLA has no ragged all-to-all for a CPU"
    elif v5e and devices > V5E_CHIPS:
        reason = f"a v5e of more than {V5E_CHIPS} chips has no ragged all-to-all"
    elif decoding:
        reason = "the few tokens of a decode step travel once instead of twice"
    elif fewer:
        reason = (
            f"whole tokens to {shards} shards are fewer bytes than {active} rows there and back"
        )
    else:
        dispatch = exchanged_experts
        reason = (
            f"{active} rows there and back are fewer bytes than whole tokens to {shards} shards"
        )
    _say_once(f"{dispatch.__name__} on {here.platform}: {reason}")
    return dispatch, reason


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def summed(
    share_ND: Float[Array, "N D"], over: Names, sum_over: Names, dtype: DTypeLike
) -> Float[Array, "M D"]:
    """The shares of all devices added in float32; each keeps its own tokens, rounded once.

    Backward: everybody's tokens' gradient, which travels in `dtype`, to everybody.
    """
    if over:
        share_ND = sum_scattered(share_ND, over, dim=0)
    return _psum(share_ND, sum_over).astype(dtype)


def _summed_forward(share_ND, over, sum_over, dtype):
    return summed(share_ND, over, sum_over, dtype), None


def _summed_backward(over, sum_over, dtype, _, dout_MD):
    # shard_map hands each device of sum_over its part of the gradient of what they all hold
    dout_MD = _psum(dout_MD.astype(jnp.float32), sum_over).astype(dtype)
    if over:
        dout_MD = lax.all_gather(dout_MD, over, tiled=True)
    return (dout_MD.astype(jnp.float32),)


summed.defvjp(_summed_forward, _summed_backward)


def _own(rows_CD, local_C, layer, *, experts, cfg):
    """What this device's experts say of these rows; 0 where the expert is −1."""
    ones = jnp.ones((1, rows_CD.shape[0], 1), jnp.float32)
    return experts(rows_CD[None], local_C[None, :, None], ones, layer, cfg)[0]


def _rows(pairs, over, sum_over, wanted):
    """Rows of the buffer, of so many pairs of each device: as wanted, and not more than all."""
    return min(wanted or -(-ROOM * pairs // _size(sum_over)), pairs * _size(over))


def _cut(x_MX, parts, filler=0):
    """[M, X] in parts of equal size, [parts, M/parts, X], filled up at the end."""
    missing = -x_MX.shape[0] % parts
    x_MX = jnp.pad(x_MX, ((0, missing), (0, 0)), constant_values=filler)
    return x_MX.reshape(parts, -1, x_MX.shape[1])


def _joined(y_PMD, rows):
    return y_PMD.reshape(-1, y_PMD.shape[2])[:rows]


def _needed(count, rows):
    return (count + rows - 1) // rows


def _size(names: Names) -> int:
    return math.prod(lax.axis_size(name) for name in names)


def _psum(x: Array, names: Names) -> Array:
    return lax.psum(x, names) if names else x


@functools.lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    _log.info(message)
