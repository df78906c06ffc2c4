# SPDX-License-Identifier: Apache-2.0
"""The public functions: check their input and pick an implementation.

Next: reference.py for what is computed, pages.py for how the kernels see a cache.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import floats, integers, scale_of, window_size
from pallas_kernels.decode_attention import reference, xla
from pallas_kernels.decode_attention.signature import PagedAttention
from pallas_kernels.dispatch import Impl, Implementation, mosaic, pick
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.common import check, checked_layout, same_batch
from pallas_kernels.sink_attention.signature import Attention

_HERE = "pallas_kernels.decode_attention"
IMPLS: dict[str, Implementation[Attention]] = mosaic(_HERE) | {
    "xla": Implementation(xla.xla, xla.unsupported),
    "reference": Implementation(reference.reference, reference.unsupported),
}
_PAGED: dict[str, Implementation[PagedAttention]] = mosaic(_HERE, "_paged") | {
    "xla": Implementation(xla.xla_paged, xla.unsupported),
    "reference": Implementation(reference.reference_paged, reference.unsupported),
}


def decode_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    sink_N: Float[Array, " N"],
    *,
    q_positions_BT: Int[Array, "B T"],
    k_positions_BS: Int[Array, "B S"],
    q_segment_ids_BT: Int[Array, "B T"],
    k_segment_ids_BS: Int[Array, "B S"],
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`sink_attention` for a few queries against a cache: same arguments, same (o, lse).

    z = scale·q·k over the keys a query sees;  lse = log(Σ e^z + e^sink);  o = Σ e^{z − lse}·v

    Slots may be in any order (a ring buffer). The kernels read only blocks in which some query
    sees a slot, and take at most 16 queries. A row's bits depend on its own slots only: not on
    the batch, nor on empty room at the end of the cache (kernels; XLA promises nothing).
    On a TPU keep the cache as [B, S, K·H] and reshape it in the call: as [.., K, H] its small
    axes are padded to tiles, and the kernel first has to copy it. On a GPU let S be a multiple
    of 64, or at least of 8, or the cache is copied to pad it.

    Args: see `sink_attention`. scale: 1/sqrt(H) unless given.
    Numerics: scores, softmax and sums in float32; weights are cast to v's dtype before the
        product with v. What an unseen slot of v holds cannot leak (kernels).
    Raises: ValueError for shapes that do not fit; NotImplementedError where a named `impl`
        cannot run, or when differentiated.
    Source: splitting a row over the machine: arXiv:2311.01282.
    """
    q_BTNH, k_BSKH, v_BSKH, sink_N = _arrays(q_BTNH, k_BSKH, v_BSKH, sink_N)
    same_batch(q_BTNH, k_BSKH)
    layout = Layout(q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    layout = checked_layout(layout, q_BTNH, k_BSKH)
    statics = window_size(window), scale_of(scale, q_BTNH.shape[3])
    chosen = pick(impl, IMPLS, q_BTNH, k_BSKH)
    return chosen(q_BTNH, k_BSKH, v_BSKH, sink_N, layout, *statics)


def paged_decode_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_PSKH: Float[Array, "P S K H"],
    v_PSKH: Float[Array, "P S K H"],
    sink_N: Float[Array, " N"],
    *,
    page_table_BJ: Int[Array, "B J"],
    lengths_B: Int[Array, " B"],
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`decode_attention` where token s of row b is token s % S of page page_table[b, s // S].

    Args:
        k_PSKH: P pages of S tokens each; rows may share pages.
        page_table_BJ: entries past a row's last page may be anything, −1 too.
        lengths_B: tokens of each row, its T new ones included, which are the last: the queries
            sit at lengths − T … lengths − 1. Those before 0, and all of a row of length 0, see
            nothing.
    Returns:
        o in q's dtype, lse in float32; a query that sees nothing gives o = 0 and lse = sink.
    Otherwise as `decode_attention`. With a window only the pages of the window are listed and
    read. On a TPU keep pages as [P, S, K·H] and reshape them in the call.
    Source: pages: arXiv:2309.06180.
    """
    q_BTNH, k_PSKH, v_PSKH, sink_N = _arrays(q_BTNH, k_PSKH, v_PSKH, sink_N)
    page_table_BJ = integers("page_table_BJ", page_table_BJ)
    B, H = q_BTNH.shape[0], q_BTNH.shape[3]
    if page_table_BJ.ndim != 2 or page_table_BJ.shape[0] != B or page_table_BJ.shape[1] == 0:
        raise ValueError(
            f"page_table_BJ must list pages for each of the {B} rows, [B, J] with J ≥ 1; got "
            f"{page_table_BJ.shape}."
        )
    lengths_B = integers("lengths_B", lengths_B, (B,))
    statics = window_size(window), scale_of(scale, H)
    chosen = pick(impl, _PAGED, q_BTNH, k_PSKH, page_table_BJ)
    return chosen(q_BTNH, k_PSKH, v_PSKH, sink_N, page_table_BJ, lengths_B, *statics)


def _arrays(q: Any, k: Any, v: Any, sink: Any) -> tuple[Array, Array, Array, Array]:
    """As arrays that fit together, and have no gradient."""
    q, k, v = (floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    sink = None if sink is None else floats("sink", sink)
    check(q, k, v, sink)
    return _no_gradient(q), _no_gradient(k), _no_gradient(v), _no_gradient(sink)


@jax.custom_jvp
def _no_gradient(x: Any) -> Any:
    return x


@_no_gradient.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "decode_attention has no gradient; differentiate sink_attention, or put stop_gradient "
        "around the input."
    )
