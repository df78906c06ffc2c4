# SPDX-License-Identifier: Apache-2.0
"""The derivative of sink attention, which its implementations share.

Next: common.py for the sums of the backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import signature as sig
from pallas_kernels.sink_attention.common import backward_sums, name_for_checkpoint


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_with_gradients(
    forward: Callable[..., sig.Result],
    gradients: Callable[..., sig.Gradients],
    q: Array,
    k: Array,
    v: Array,
    sink: Array,
    layout: Layout,
) -> sig.Result:
    """forward(q, k, v, sink, layout), with the derivative that `gradients` computes.

    gradients(q, k, v, dout, lse, delta, layout) returns (dq, dk, dv) as `sink_attention_backward`
    does. They are cast to the dtypes of q, k and v.
    """
    return forward(q, k, v, sink, layout)


def _attend_fwd(forward: Any, _gradients: Any, *arrays: Any) -> tuple[sig.Result, Any]:
    o, lse = name_for_checkpoint(*forward(*arrays))
    return (o, lse), (*arrays, o, lse)


def _attend_bwd(_forward: Any, gradients: Any, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, sink, layout, o, lse = saved
    dout, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, dout, dlse)
    dq, dk, dv = gradients(q, k, v, dout, lse, delta, layout)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsink, None


attend_with_gradients.defvjp(_attend_fwd, _attend_bwd)
