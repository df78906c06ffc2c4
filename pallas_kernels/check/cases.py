# SPDX-License-Identifier: Apache-2.0
"""Small hard cases for every kernel: ragged, packed, windowed, four-bit and low-rank inputs.

All kernels support their sizes. Next: one.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.bench.ops import OPS, Op, make_attention_call
from pallas_kernels.decode_attention import decode_attention_in_stack
from pallas_kernels.grouped_matmul.cases import MatmulCase
from pallas_kernels.sink_attention.api import shares_keys, sink_attention
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase

_RAGGED = MatmulCase("ragged_groups", 1331, 256, 512, (1, 290, 170, 0, 530, 240, 70))
_FEW = MatmulCase("rows_past_the_sum", 331, 256, 512, (70, 0, 5, 0, 130, 0, 0))


def _with_op(operation: str, *cases: Any) -> tuple[tuple[Op, Any], ...]:
    return tuple((OPS[operation], case) for case in cases)


def _decode_in_stack(case: Any, impl: str) -> Callable[..., Any]:
    """`decode_attention_in_stack` of the second of two layers, the first one NaN."""

    def attend(q: Any, k: Any, v: Any, sink: Any, **layout: Any) -> Any:
        k, v = (jnp.stack([jnp.full_like(x, jnp.nan), x]) for x in (k, v))
        return decode_attention_in_stack(q, k, v, sink, layer=jnp.int32(1), **layout)

    return make_attention_call(attend, case, impl)


def _attend_to_shared_keys(case: Any, impl: str) -> Callable[..., Any]:
    """`sink_attention` where all segments see the keys of the first one."""

    def attend(q: Any, k: Any, v: Any, sink: Any, *, k_segment_ids_BS: Any, **layout: Any) -> Any:
        last_BS = jnp.where(k_segment_ids_BS == 1, jnp.max(k_segment_ids_BS), k_segment_ids_BS)
        shared = {"k_segment_ids_BS": k_segment_ids_BS, "k_last_segment_ids_BS": last_BS}
        return sink_attention(q, k, v, sink, **shared, **layout)

    return make_attention_call(attend, case, impl)


_SHARED_KEYS = replace(OPS["sink_attention"], call=_attend_to_shared_keys)
_STACKED_DECODE = replace(OPS["decode_attention"], call=_decode_in_stack)
_attention = partial(AttentionCase, N=16, K=2, H=64)
HARD_CASES: dict[str, tuple[tuple[Op, Any], ...]] = {  # 8 query heads a key head, as in GPT-OSS
    "sink_attention": (
        *_with_op(
            "sink_attention",
            _attention("ragged", 2, 300, 300, layout="right"),
            _attention("window_packed", 2, 421, 421, window=128, layout="packed"),
            _attention("window_left_big_sinks", 2, 300, 300, window=33, layout="left", sinks="big"),
            _attention("chunk_no_sinks", 1, 129, 590, layout="chunk", sinks="none"),
        ),
        (_SHARED_KEYS, _attention("shared_keys", 2, 421, 421, layout="packed")),
        (_SHARED_KEYS, _attention("window_shared_keys", 2, 421, 421, window=128, layout="packed")),
    ),
    "decode_attention": (
        *_with_op(
            "decode_attention",
            _attention("uneven", 3, 1, 264, layout="chunk"),
            _attention("ring", 3, 1, 136, window=128, layout="ring"),
            _attention("several_new", 2, 3, 392, layout="left", sinks="big"),
        ),
        (_STACKED_DECODE, _attention("layer_of_a_stack", 3, 1, 264, layout="chunk")),
    ),
    "grouped_matmul": (
        *_with_op("grouped_matmul", _RAGGED, _FEW),
        *_with_op("grouped_matmul_mxfp4", _RAGGED._replace(name="four_bits")),
        *_with_op("grouped_matmul_rounded", _RAGGED._replace(name="four_bits_with_masters")),
        *_with_op("grouped_matmul_low_rank", _RAGGED._replace(name="low_rank", rank=5)),
    ),
    "grouped_swiglu": (
        *_with_op("grouped_swiglu", _RAGGED, _FEW),
        *_with_op("grouped_swiglu_mxfp4", _RAGGED._replace(name="four_bits")),
        *_with_op("grouped_swiglu_rounded", _RAGGED._replace(name="four_bits_with_masters")),
        *_with_op("grouped_swiglu_low_rank", _RAGGED._replace(name="low_rank", rank=5)),
    ),
    "token_logprobs": _with_op(
        "token_logprobs",
        LogprobsCase("padded_head", 300, 128, 1024, 1000, 0.7),
        LogprobsCase("few_tokens", 5, 192, 640, 640),
        LogprobsCase("cold", 517, 256, 2176, 2111, 0.5),
    ),
}


def select_hard_cases(operation: str, impl: str) -> tuple[tuple[Op, Any], ...]:
    """Return HARD_CASES of the operation, without those that this implementation refuses."""
    refuses = operation == "sink_attention" and ":" not in impl and not shares_keys(impl)
    return tuple(x for x in HARD_CASES[operation] if not (refuses and x[0] is _SHARED_KEYS))
