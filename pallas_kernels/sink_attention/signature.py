# SPDX-License-Identifier: Apache-2.0
"""The signatures of attention with a sink, for every implementation and for decoding.

Next: reference.py for the formula.
"""

from typing import Protocol

from jaxtyping import Array, Float

from pallas_kernels.masks import Layout

Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B S K H"]  # and values
Sinks = Float[Array, " N"]
Rows = Float[Array, "B T N"]  # lse or Δ
Result = tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]  # o and lse
Gradients = tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]


class Attention(Protocol):
    """(o, lse) as `sink_attention` documents them; window 0 means no window."""

    def __call__(
        self,
        q_BTNH: Queries,
        k_BSKH: Keys,
        v_BSKH: Keys,
        sink_N: Sinks,
        layout: Layout,
        window: int,
        scale: float,
    ) -> Result: ...


class AttentionBackward(Protocol):
    """(dq, dk, dv) as `sink_attention_backward` documents them; lse must be finite."""

    def __call__(
        self,
        q_BTNH: Queries,
        k_BSKH: Keys,
        v_BSKH: Keys,
        dout_BTNH: Queries,
        lse_BTN: Rows,
        delta_BTN: Rows,
        layout: Layout,
        window: int,
        scale: float,
    ) -> Gradients: ...
