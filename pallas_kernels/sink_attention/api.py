# SPDX-License-Identifier: Apache-2.0
"""The public functions: they check their input and select an implementation.

Next: reference.py for the formula, xla.py for the blocks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import as_floats, resolve_scale, window_size
from pallas_kernels.dispatch import (
    Impl,
    Implementation,
    Run,
    implementations_of,
    lazy_implementation,
    select_implementation,
)
from pallas_kernels.masks import SHARED_KEYS_UNSUPPORTED, Layout
from pallas_kernels.sink_attention import reference, xla
from pallas_kernels.sink_attention.common import (
    as_int32_layout,
    check_attention_arrays,
    check_backward_rows,
    check_qkv,
    check_same_batch,
)
from pallas_kernels.sink_attention.signature import Attention, AttentionBackward

_HERE = "pallas_kernels.sink_attention"


def _triton(op: str) -> dict[str, Implementation[Any]]:
    module = f"{_HERE}.triton_kernels.jax_triton_call"
    return {"triton": lazy_implementation(module, f"{op}_triton", ("gpu",), proven=False)}


IMPLS: dict[str, Implementation[Attention]] = implementations_of(
    _HERE,
    "sink_attention",
    xla.sink_attention_xla,
    reference.sink_attention_reference,
    extra=_triton("sink_attention"),
    invariant_in=_HERE,
)
BACKWARD_IMPLS: dict[str, Implementation[AttentionBackward]] = implementations_of(
    _HERE,
    "sink_attention_backward",
    xla.sink_attention_backward_xla,
    reference.sink_attention_backward_reference,
    extra=_triton("sink_attention_backward"),
)
# Those that know `k_last_segment_ids_BS`. An implementation that ignored it would be wrong without
# an error, so the others refuse it.
SHARING = ("xla", "reference", "xla_invariant", "mosaic_gpu", "mosaic_tpu")


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
    k_last_segment_ids_BS: Int[Array, "B S"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Causal grouped-query attention with a learned sink per head; returns (o, lse).

    z = scale·q·k over the keys a query sees;  lse = log(Σ e^z + e^sink);  o = Σ e^{z − lse}·v
    Δ = rowsum(dO∘O) − dlse;  dz = e^{z − lse}·(dO·v − Δ);  dsink = −Σ e^{sink − lse}·Δ

    A query sees the keys of its own segment (0 is padding) at positions up to its own, at most
    `window` of them counting its own. Positions and segments are arrays, so another layout of the
    same shape needs no compilation. Keys may be in any order.
    With `k_last_segment_ids_BS` several segments share keys: a key is seen by all segments from its
    own to that one, which all keys of a segment have in common. Number a prompt's segment s and
    those of its n answers s + 1 … s + n; the prompt's keys have s + n, an answer's keys their own.
    The `..._invariant` implementations are batch-invariant, under conditions on the layout that
    xla_invariant.py and mosaic_invariant.py state; "auto" never selects them.
    To attend to parts of the keys, use sink = −inf and merge the results by their lse;
    `sink_attention_backward` computes the gradients of a part.

    Args:
        q_positions_BT: positions of the queries. Positions of q and k may be omitted together if
            T = S, and so may segments.
        scale: 1/sqrt(H) by default.
    Returns:
        o in q's dtype; lse in float32, the sink included. A query without keys gives o = 0 and
        lse = sink, and finite gradients.
    Numerics: scores, softmax and sums in float32; weights are cast to v's dtype before the
        product with v; dsink is summed in float32.
    Raises: ValueError for shapes that do not fit; NotImplementedError if a named `impl` cannot
        run.
    Source: GPT-OSS model card §2.2; blocks as in arXiv:2307.08691.
    """
    q_BTNH, k_BSKH, v_BSKH = (
        as_floats(name, x) for name, x in (("q", q_BTNH), ("k", k_BSKH), ("v", v_BSKH))
    )
    if sink_N is not None:  # else `check_attention_arrays` raises the error
        sink_N = as_floats("sink", sink_N)
    check_attention_arrays(q_BTNH, k_BSKH, v_BSKH, sink_N)
    check_same_batch(q_BTNH, k_BSKH)
    layout_arrays = (q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    layout = _default_layout(q_BTNH, k_BSKH, layout_arrays, k_last_segment_ids_BS)
    impls = IMPLS if k_last_segment_ids_BS is None else refuse_shared_keys(IMPLS)
    run = select_implementation(impl, impls, q_BTNH, k_BSKH)
    statics = layout, window_size(window), resolve_scale(scale, q_BTNH.shape[3])
    return run(q_BTNH, k_BSKH, v_BSKH, sink_N, *statics)


def sink_attention_backward(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    dout_BTNH: Float[Array, "B T N H"],
    lse_BTN: Float[Array, "B T N"],
    delta_BTN: Float[Array, "B T N"],
    *,
    q_positions_BT: Int[Array, "B T"] | None = None,
    k_positions_BS: Int[Array, "B S"] | None = None,
    q_segment_ids_BT: Int[Array, "B T"] | None = None,
    k_segment_ids_BS: Int[Array, "B S"] | None = None,
    k_last_segment_ids_BS: Int[Array, "B S"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """The gradient of attention over a part of the keys; returns (dq, dk, dv).

    p = e^{z − lse};  dz = p·(dO·v − Δ);  dq = scale·Σ_s dz·k;  dk = scale·Σ_t dz·q;  dv = Σ_t p·dO

    lse and Δ = rowsum(dO∘O) − dlse must be over all keys and the sink (`common.backward_sums`);
    nothing else of the other parts is needed. dq is this part's share of a sum; dk and dv are
    complete. sink_attention's own backward pass runs this function. It is public for backward
    passes over parts of the keys, and has no gradient itself. Arguments are those of
    sink_attention, dout in q's dtype. A row with lse = −inf has no weights.

    Returns: float32, as dq is a part of a sum.
    Numerics: as of sink_attention; Hopper's and Triton's kernels round the results to q's dtype.
    Raises: as sink_attention.
    Source: arXiv:2307.08691, algorithm 2.
    """
    q_BTNH, k_BSKH, v_BSKH, dout_BTNH, lse_BTN, delta_BTN = (
        as_floats(name, x)
        for name, x in (
            ("q", q_BTNH),
            ("k", k_BSKH),
            ("v", v_BSKH),
            ("dout", dout_BTNH),
            ("lse", lse_BTN),
            ("delta", delta_BTN),
        )
    )
    check_qkv(q_BTNH, k_BSKH, v_BSKH)
    check_backward_rows(q_BTNH, dout_BTNH, lse_BTN, delta_BTN)
    check_same_batch(q_BTNH, k_BSKH)
    layout_arrays = (q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    layout = _default_layout(q_BTNH, k_BSKH, layout_arrays, k_last_segment_ids_BS)
    impls = BACKWARD_IMPLS
    if k_last_segment_ids_BS is not None:
        impls = refuse_shared_keys(impls)
    run = select_implementation(impl, impls, q_BTNH, k_BSKH)
    lse_BTN = jnp.where(jnp.isfinite(lse_BTN), lse_BTN, 0.0)  # all scores of such rows are UNSEEN
    statics = layout, window_size(window), resolve_scale(scale, q_BTNH.shape[3])
    return run(q_BTNH, k_BSKH, v_BSKH, dout_BTNH, lse_BTN, delta_BTN, *statics)


def shares_keys(impl: Impl) -> bool:
    """True if `sink_attention(…, impl=impl)` takes `k_last_segment_ids_BS`, on any platform."""
    return impl == "auto" or (impl if isinstance(impl, str) else impl[0]) in SHARING


def refuse_shared_keys(
    impls: Mapping[str, Implementation[Run]],
) -> dict[str, Implementation[Run]]:
    """The implementations, of which those that cannot share keys refuse every shape."""
    return {
        name: impl
        if name in SHARING
        else replace(impl, unsupported=lambda *_: SHARED_KEYS_UNSUPPORTED)
        for name, impl in impls.items()
    }


def _default_layout(
    q: Array, k: Array, layout_arrays: tuple[Any, ...], last: Array | None
) -> Layout:
    """The layout with defaults for omitted arrays. Raises ValueError where there is no default."""
    (B, T), S = q.shape[:2], k.shape[1]
    if layout_arrays[0] is None and T != S:
        raise ValueError(
            f"q and k must have equal lengths if positions are omitted; got T={T}, S={S}. "
            "Pass q_positions_BT and k_positions_BS."
        )
    for name, q_given, k_given in (
        ("positions", *layout_arrays[:2]),
        ("segment ids", *layout_arrays[2:]),
    ):
        if (q_given is None) != (k_given is None):
            raise ValueError(
                f"{name} must be given for both q and k or for neither; those of "
                f"{'q' if q_given is None else 'k'} are missing. If queries and keys are the same "
                "tokens, pass the same array twice."
            )
    arange, one_segment = jnp.arange(max(T, S)), jnp.ones(max(T, S), jnp.int32)
    defaults = zip((arange, arange, one_segment, one_segment), (T, S, T, S), strict=True)
    arrays = (
        jnp.broadcast_to(default[None, :length], (B, length)) if x is None else x
        for x, (default, length) in zip(layout_arrays, defaults, strict=True)
    )
    return as_int32_layout(Layout._make((*arrays, last)), q, k)
