# SPDX-License-Identifier: Apache-2.0
"""The public functions: they check their input and pick an implementation.

Next: reference.py for the formula, xla.py for the blocks.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import floats, scale_of, window_size
from pallas_kernels.dispatch import Impl, Implementation, lazily, mosaic, pick
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import reference, xla
from pallas_kernels.sink_attention.common import (
    check,
    check_arrays,
    check_rows,
    checked_layout,
    same_batch,
)
from pallas_kernels.sink_attention.signature import Attention, AttentionBackward

_HERE = "pallas_kernels.sink_attention"
_TRITON = f"{_HERE}.triton_kernels.jax_triton_call"
IMPLS: dict[str, Implementation[Attention]] = mosaic(_HERE) | {
    "triton": lazily(_TRITON, "triton", ("gpu",), proven=False),
    "xla": Implementation(xla.xla, xla.unsupported),
    "reference": Implementation(reference.reference, reference.unsupported),
}
BACKWARD_IMPLS: dict[str, Implementation[AttentionBackward]] = mosaic(_HERE, "_backward") | {
    "triton": lazily(_TRITON, "triton_backward", ("gpu",), proven=False),
    "xla": Implementation(xla.xla_backward, xla.unsupported),
    "reference": Implementation(reference.reference_backward, reference.unsupported),
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
    impl: Impl = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Causal grouped-query attention with a learned sink per head; returns (o, lse).

    z = scale·q·k over the keys a query sees;  lse = log(Σ e^z + e^sink);  o = Σ e^{z − lse}·v
    Δ = rowsum(dO∘O) − dlse;  dz = e^{z − lse}·(dO·v − Δ);  dsink = −Σ e^{sink − lse}·Δ

    A query sees the keys of its own segment (0 is padding) at positions up to its own, at most
    `window` of them counting itself. Positions and segments are arrays: nothing compiles again
    for a longer prompt or a later decode step. Keys may be in any order.
    Partial results, over parts of the keys, take sink = −inf and merge by lse; their gradients are
    `sink_attention_backward`'s.

    Args:
        q_positions_BT: where the queries sit. Positions of q and k may be left out together when
            T = S, and so may segments.
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
    q_BTNH, k_BSKH, v_BSKH = (
        floats(name, x) for name, x in (("q", q_BTNH), ("k", k_BSKH), ("v", v_BSKH))
    )
    if sink_N is not None:  # or `check` says what to do
        sink_N = floats("sink", sink_N)
    check(q_BTNH, k_BSKH, v_BSKH, sink_N)
    same_batch(q_BTNH, k_BSKH)
    given = (q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    layout = _layout(q_BTNH, k_BSKH, given)
    chosen = pick(impl, IMPLS, q_BTNH, k_BSKH)
    where = layout, window_size(window), scale_of(scale, q_BTNH.shape[3])
    return chosen(q_BTNH, k_BSKH, v_BSKH, sink_N, *where)


def sink_attention_backward(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    do_BTNH: Float[Array, "B T N H"],
    lse_BTN: Float[Array, "B T N"],
    delta_BTN: Float[Array, "B T N"],
    *,
    q_positions_BT: Int[Array, "B T"] | None = None,
    k_positions_BS: Int[Array, "B S"] | None = None,
    q_segment_ids_BT: Int[Array, "B T"] | None = None,
    k_segment_ids_BS: Int[Array, "B S"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """The gradient of attention over a part of the keys; returns (dq, dk, dv).

    p = e^{z − lse};  dz = p·(dO·v − Δ);  dq = scale·Σ_s dz·k;  dk = scale·Σ_t dz·q;  dv = Σ_t p·dO

    lse and Δ = rowsum(dO∘O) − dlse are those of all keys and the sink (`common.backward_sums`), so
    that nothing else of the other parts is needed: dq is this part's share of a sum, dk and dv are
    whole. It is what sink_attention's own backward pass runs, for who writes one over parts of the
    keys; it has no gradient itself. Arguments are sink_attention's, do in q's dtype; where lse is
    −inf there are no weights.

    Returns: float32, as they are parts of sums.
    Numerics: as sink_attention's; Hopper's and Triton's kernels round the results to q's dtype.
    Raises: as sink_attention.
    Source: arXiv:2307.08691, algorithm 2.
    """
    q_BTNH, k_BSKH, v_BSKH, do_BTNH, lse_BTN, delta_BTN = (
        floats(name, x)
        for name, x in (("q", q_BTNH), ("k", k_BSKH), ("v", v_BSKH), ("do", do_BTNH),
                        ("lse", lse_BTN), ("delta", delta_BTN))
    )  # fmt: skip
    check_arrays(q_BTNH, k_BSKH, v_BSKH)
    check_rows(q_BTNH, do_BTNH, lse_BTN, delta_BTN)
    same_batch(q_BTNH, k_BSKH)
    given = (q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    layout = _layout(q_BTNH, k_BSKH, given)
    chosen = pick(impl, BACKWARD_IMPLS, q_BTNH, k_BSKH)
    lse_BTN = jnp.where(jnp.isfinite(lse_BTN), lse_BTN, 0.0)  # there every score is UNSEEN
    where = layout, window_size(window), scale_of(scale, q_BTNH.shape[3])
    return chosen(q_BTNH, k_BSKH, v_BSKH, do_BTNH, lse_BTN, delta_BTN, *where)


def _layout(q: Array, k: Array, given: tuple[Any, ...]) -> Layout:
    """Of what is given and what is left out; ValueError where that cannot be known."""
    (B, T), S = q.shape[:2], k.shape[1]
    if given[0] is None and T != S:
        raise ValueError(
            f"q and k must have equal lengths where positions are left out; got T={T}, S={S}. "
            "Pass q_positions_BT and k_positions_BS."
        )
    for name, q_given, k_given in (("positions", *given[:2]), ("segment ids", *given[2:])):
        if (q_given is None) != (k_given is None):
            raise ValueError(
                f"{name} must be given for both q and k or for neither; those of "
                f"{'q' if q_given is None else 'k'} are missing. Where the keys are those of the "
                "queries, pass the same array twice."
            )
    arange, ones = jnp.arange(max(T, S)), jnp.ones(max(T, S), jnp.int32)
    defaults = zip((arange, arange, ones, ones), (T, S, T, S), strict=True)
    layout = Layout._make(
        jnp.broadcast_to(default[None, :length], (B, length)) if x is None else x
        for x, (default, length) in zip(given, defaults, strict=True)
    )
    return checked_layout(layout, q, k)
