# SPDX-License-Identifier: Apache-2.0
"""Decoding the samples of a prompt: its keys are stored and read once, not once a sample.

A row's own keys are one part of its attention, and its prompt's keys another. The queries of all
samples of a prompt are one row of queries of the second part, so a kernel reads the keys once for
them. Next: jaxmoe/model/cache.py; jaxmoe/rollout/cache_rows.py, which makes such a cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.model.cache import PromptKeys
from pallas_kernels import decode_attention
from pallas_kernels.decode_attention import MAX_QUERIES
from pallas_kernels.sink_attention.merge import merge_parts


def decode_options(attend: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the options with which an op calls decode_attention; None for another function."""
    op, options = (attend.func, attend.keywords) if type(attend) is partial else (attend, {})
    return options if op is decode_attention else None


def merges_parts(decode: Callable[..., Any]) -> bool:
    """Return True if the results of this `Ops.decode` may be merged: those of decode_attention.

    False for batch-invariant implementations, whose bits are those of a softmax in one part, and
    for another function, whose log-sum-exp nothing has read so far.
    """
    if (options := decode_options(decode)) is None:
        return False
    impl = options.get("impl", "auto")
    name = impl if isinstance(impl, str) else impl[0]
    return not name.endswith("_invariant")


def attend_with_prompt(
    attend: Callable[..., Any],
    prompt: PromptKeys,
    k_prompt: Array,
    v_prompt: Array,
    q_BTNH: Array,
    k_own: Array,
    v_own: Array,
    sink_N: Array,
    *,
    q_positions_BT: Array,
    k_positions_BS: Array,
    q_segment_ids_BT: Array,
    k_segment_ids_BS: Array,
    **options: Any,
) -> tuple[Array, Array]:
    """Return the (o, lse) of `attend` over the keys of each row and of its prompt together.

    o = e^{lse₁ − lse}·o₁ + e^{lse₂ − lse}·o₂ of the two parts (pallas_kernels `merge_parts`)

    k_prompt, v_prompt: as k_own and v_own, with prompts instead of rows.
    Numerics: the parts' o are in q's dtype before float32 merges them, so that o has at most twice
        the rounding error of one part. Not batch-invariant: the softmax is in two parts.
    """
    row_part = attend(
        q_BTNH,
        k_own,
        v_own,
        jnp.full_like(sink_N, -jnp.inf),
        q_positions_BT=q_positions_BT,
        k_positions_BS=k_positions_BS,
        q_segment_ids_BT=q_segment_ids_BT,
        k_segment_ids_BS=k_segment_ids_BS,
        **options,
    )
    queries = (q_BTNH, q_positions_BT, q_segment_ids_BT)
    q_PQNH, positions_PQ, segments_PQ = (_group_samples(x, prompt) for x in queries)
    # The kernels take few queries; more read the keys once for each part of them.
    cuts = [slice(i, i + MAX_QUERIES) for i in range(0, q_PQNH.shape[1], MAX_QUERIES)]
    parts = [
        attend(
            q_PQNH[:, cut],
            k_prompt,
            v_prompt,
            sink_N,
            q_positions_BT=positions_PQ[:, cut],
            k_positions_BS=prompt.stack.positions_BC,
            q_segment_ids_BT=segments_PQ[:, cut],
            k_segment_ids_BS=prompt.stack.segments_BC,
            **options,
        )
        for cut in cuts
    ]
    rows = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    o_BTNH, lse_BTN = (_ungroup_samples(x, prompt, q_BTNH.shape[1]) for x in rows)
    o_BTNH, lse_BTN = merge_parts(o_BTNH, lse_BTN, *row_part)
    return o_BTNH.astype(q_BTNH.dtype), lse_BTN


def _group_samples(x_BT: Array, prompt: PromptKeys) -> Array:
    """[B, T, …] as [P, samples·T, …]; places without a row are zeros, so they see no key."""
    prompts = prompt.stack.positions_BC.shape[0]
    if prompt.place_B is not None:
        shape = (prompts * prompt.samples, *x_BT.shape[1:])
        x_BT = jnp.zeros(shape, x_BT.dtype).at[prompt.place_B].set(x_BT)
    return x_BT.reshape(prompts, -1, *x_BT.shape[2:])


def _ungroup_samples(x_PQ: Array, prompt: PromptKeys, time: int) -> Array:
    x_BT = x_PQ.reshape(-1, time, *x_PQ.shape[2:])
    return x_BT if prompt.place_B is None else x_BT[prompt.place_B]
