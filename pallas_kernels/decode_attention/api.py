# SPDX-License-Identifier: Apache-2.0
"""The public functions: they check their input and select an implementation.

Next: reference.py for the formula, pages.py for the kernels' view of a cache.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import as_floats, as_integers, resolve_scale, window_size
from pallas_kernels.decode_attention import reference, xla
from pallas_kernels.dispatch import (
    Impl,
    Implementation,
    implementations_of,
    kernel_module,
    select_implementation,
)
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.common import (
    as_int32_layout,
    check_attention_arrays,
    check_same_batch,
)
from pallas_kernels.sink_attention.signature import Attention

_HERE = "pallas_kernels.decode_attention"
IMPLS: dict[str, Implementation[Attention]] = implementations_of(
    _HERE,
    "decode_attention",
    xla.decode_attention_xla,
    reference.decode_attention_reference,
    invariant_in="pallas_kernels.sink_attention",
)


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

    Slots may be in any order (a ring buffer). The kernels read only blocks with a visible slot, and
    take at most 16 queries. With the kernels a row's bits depend on its own slots only, not on
    other rows or on free slots at the end of the cache; XLA does not guarantee this. Those of the
    `..._invariant` implementations are also those of `sink_attention` in a training forward. They
    need the queries of a row to be of one segment, whose keys are less than S positions apart.
    On a TPU store the cache as [B, S, K·H] and reshape it in the call: as [.., K, H] its small axes
    would be padded to tiles, so the kernel would copy it first. On a GPU use an S that is a
    multiple of 64, or at least of 8; otherwise the cache is copied to pad it.

    Args: see `sink_attention`. scale: 1/sqrt(H) by default.
    Numerics: scores, softmax and sums in float32; weights are cast to v's dtype before the
        product with v. The kernels ignore the contents of invisible slots, NaN included.
    Raises: ValueError for shapes that do not fit; NotImplementedError if a named `impl` cannot
        run, or when differentiated.
    Source: splitting a row among cores: arXiv:2311.01282.
    """
    q_BTNH, k_BSKH, v_BSKH, sink_N = _check_arrays(q_BTNH, k_BSKH, v_BSKH, sink_N)
    check_same_batch(q_BTNH, k_BSKH)
    layout = Layout(q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    layout = as_int32_layout(layout, q_BTNH, k_BSKH)
    statics = window_size(window), resolve_scale(scale, q_BTNH.shape[3])
    run = select_implementation(impl, IMPLS, q_BTNH, k_BSKH)
    return run(q_BTNH, k_BSKH, v_BSKH, sink_N, layout, *statics)


def decode_attention_in_stack(
    q_BTNH: Float[Array, "B T N H"],
    k_LBSKH: Float[Array, "L B S K H"],
    v_LBSKH: Float[Array, "L B S K H"],
    sink_N: Float[Array, " N"],
    *,
    layer: Int[Array, ""],
    q_positions_BT: Int[Array, "B T"],
    k_positions_BS: Int[Array, "B S"],
    q_segment_ids_BT: Int[Array, "B T"],
    k_segment_ids_BS: Int[Array, "B S"],
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`decode_attention` against caches that several layers share: layer `layer` of a stack.

    o, lse = decode_attention(q, k[layer], v[layer], …), to the bit

    In a loop over layers the caches are one array. `mosaic_gpu` reads its layer where it is; a
    slice would be a copy, which took a fifth of the time of a token on an H200 (64 rows of 8,192
    keys). The other implementations get the slice.

    Args: layer: from 0, int []. All else is as in `decode_attention`.
    Raises: ValueError for shapes that do not fit; NotImplementedError as `decode_attention`.
    """
    k_LBSKH, v_LBSKH = (
        _forbid_gradient(as_floats(name, x)) for name, x in (("k", k_LBSKH), ("v", v_LBSKH))
    )
    if k_LBSKH.ndim != 5 or k_LBSKH.shape != v_LBSKH.shape:
        raise ValueError(
            "k and v must be stacks of one shape [layers, batch, slots, heads, head size]; got "
            f"{k_LBSKH.shape} and {v_LBSKH.shape}."
        )
    layer = as_integers("layer", layer, ())
    layout = Layout(q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    # The slices are dropped by the compiler where the stack is read in place.
    k_BSKH, v_BSKH = (
        jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (k_LBSKH, v_LBSKH)
    )
    q_BTNH = as_floats("q", q_BTNH)
    if select_implementation(impl, IMPLS, q_BTNH, k_BSKH) is not IMPLS["mosaic_gpu"].run:
        return decode_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            sink_N,
            q_positions_BT=q_positions_BT,
            k_positions_BS=k_positions_BS,
            q_segment_ids_BT=q_segment_ids_BT,
            k_segment_ids_BS=k_segment_ids_BS,
            window=window,
            scale=scale,
            impl=impl,
        )
    q_BTNH, k_BSKH, v_BSKH, sink_N = _check_arrays(q_BTNH, k_BSKH, v_BSKH, sink_N)
    check_same_batch(q_BTNH, k_BSKH)
    layout = as_int32_layout(layout, q_BTNH, k_BSKH)
    statics = window_size(window), resolve_scale(scale, q_BTNH.shape[3])
    kernels: Any = kernel_module(_HERE, "mosaic_gpu")
    return kernels.decode_attention_in_stack_mosaic_gpu(
        q_BTNH, k_LBSKH, v_LBSKH, layer, sink_N, layout, *statics
    )


def _check_arrays(q: Any, k: Any, v: Any, sink: Any) -> tuple[Array, Array, Array, Array]:
    """The arguments as arrays, checked; differentiating them raises NotImplementedError."""
    q, k, v = (as_floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    sink = None if sink is None else as_floats("sink", sink)
    check_attention_arrays(q, k, v, sink)
    return _forbid_gradient(q), _forbid_gradient(k), _forbid_gradient(v), _forbid_gradient(sink)


@jax.custom_jvp
def _forbid_gradient(x: Any) -> Any:
    return x


@_forbid_gradient.defjvp
def _refuse_gradient(primals, tangents):
    raise NotImplementedError(
        "decode_attention has no gradient. Differentiate sink_attention, or apply "
        "jax.lax.stop_gradient to the input."
    )
