# SPDX-License-Identifier: Apache-2.0
"""The signature of decoding from pages; decoding from a contiguous cache has sink attention's.

Next: reference.py for the formula.
"""

from typing import Protocol

from jaxtyping import Array, Float, Int

from pallas_kernels.sink_attention.signature import Queries, Result, Sinks

PagedKeys = Float[Array, "P S K H"]  # and values
PageTable = Int[Array, "B J"]
Lengths = Int[Array, " B"]


class PagedAttention(Protocol):
    """(o, lse) as `paged_decode_attention` documents them; window 0 means no window."""

    def __call__(
        self,
        q_BTNH: Queries,
        k_PSKH: PagedKeys,
        v_PSKH: PagedKeys,
        sink_N: Sinks,
        page_table_BJ: PageTable,
        lengths_B: Lengths,
        window: int,
        scale: float,
    ) -> Result: ...
