# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its input and picks an implementation.

Next: reference.py for the formula, xla.py for the blocks.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, lazily, pick
from pallas_kernels.sink_attention import reference, xla
from pallas_kernels.sink_attention.common import check, same_batch

_HERE = "pallas_kernels.sink_attention"
_IMPLS = {
    "mosaic_gpu": lazily(f"{_HERE}.pallas_gpu", "mosaic_gpu", ("gpu",), proven=False),
    "mosaic_tpu": lazily(f"{_HERE}.pallas_tpu", "mosaic_tpu", ("tpu",), proven=False),
    "triton": lazily(f"{_HERE}.jax_triton_call", "triton", ("gpu",), proven=False),
    "xla": Implementation(xla.xla, xla.unsupported),
    "reference": Implementation(reference.reference, reference.unsupported),
}


def sink_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    sink_N: Float[Array, " N"],
    *,
    q_positions_BT: Int[Array, "B T"] | None = None,
    k_positions_BS: Int[Array, "B S"] | None = None,
    q_segment_ids_BT: Int[Array, "B T"] | None = None,
    k_segment_ids_BS: Int[Array, "B S"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Causal grouped-query attention with a learned sink per head; returns (o, lse).

    z = scale·q·k over the keys a query sees;  lse = log(Σ e^z + e^sink);  o = Σ e^{z − lse}·v
    Δ = rowsum(dO∘O) − dlse;  dz = e^{z − lse}·(dO·v − Δ);  dsink = −Σ e^{sink − lse}·Δ

    A query sees the keys of its own segment (0 is padding) at positions up to its own, at most
    `window` of them counting itself. Positions and segments are arrays: nothing compiles again
    for a longer prompt or a later decode step. Keys may be in any order.
    Partial results, over parts of the keys, take sink = −inf and merge by lse.

    Args:
        q_positions_BT: where the queries sit; may be left out with all others when T = S.
        scale: 1/sqrt(H) unless given.
    Returns:
        o in q's dtype; lse in float32, the sink included. A query without keys gives o = 0 and
        lse = sink, and finite gradients.
    Numerics: scores, softmax and sums in float32; weights are cast to v's dtype before the
        product with v; dsink is summed in float32.
    Raises: ValueError for shapes that do not fit; NotImplementedError where a named `impl`
        cannot run.
    Source: GPT-OSS model card §2.2; blocks as in arXiv:2307.08691.
    """
    check(q_BTNH, k_BSKH, v_BSKH, sink_N, window)
    same_batch(q_BTNH, k_BSKH)
    (B, T, _, H), S = q_BTNH.shape, k_BSKH.shape[1]
    if (q_positions_BT is None or k_positions_BS is None) and T != S:
        raise ValueError(
            f"q and k must have equal lengths where positions are left out; got T={T}, S={S}. "
            "Pass q_positions_BT and k_positions_BS."
        )

    arange, ones = jnp.arange(max(T, S)), jnp.ones(max(T, S))
    places = []
    for name, given, length, default in (
        ("q_positions_BT", q_positions_BT, T, arange),
        ("k_positions_BS", k_positions_BS, S, arange),
        ("q_segment_ids_BT", q_segment_ids_BT, T, ones),
        ("k_segment_ids_BS", k_segment_ids_BS, S, ones),
    ):
        x = jnp.broadcast_to(default[None, :length], (B, length)) if given is None else given
        if x.shape != (B, length):
            raise ValueError(f"{name} must have the shape {(B, length)}; got {x.shape}.")
        places.append(x.astype(jnp.int32))
    chosen = pick(impl, _IMPLS, q_BTNH, k_BSKH)
    scale = 1.0 / math.sqrt(H) if scale is None else scale
    return chosen(q_BTNH, k_BSKH, v_BSKH, sink_N, *places, window or 0, scale)
