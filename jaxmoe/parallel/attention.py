# SPDX-License-Identifier: Apache-2.0
"""The attention of rows whose tokens are sharded: what a device runs for its own part of them.

Next: jaxmoe/parallel/ring.py, halo.py and ulysses.py.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from jaxmoe.parallel.halo import halo_attention
from jaxmoe.parallel.ring import ring_attention
from jaxmoe.parallel.ulysses import ulysses_attention
from pallas_kernels import sink_attention
from pallas_kernels.dispatch import Impl, target_device

# for layers without a window, and for all layers of rows with shared keys
METHODS = {"ring": ring_attention, "zigzag": ring_attention, "ulysses": ulysses_attention}


def attend_over_shards(
    attend: Callable[..., Any], method: str, window: int | None, arguments: Collection[str]
) -> Callable[..., Any]:
    """Return the function that attends to all tokens of a row, for use inside a shard_map.

    `method` names one of METHODS; layers with a window use the halo, unless segments share keys.
    `arguments` are the names of the layout's arrays. Raises ValueError if `attend` is not
    sink_attention.
    """
    # A halo is the tokens just before a device's own, and shared keys may be further back.
    uses_halo = window is not None and "k_last_segment_ids_BS" not in arguments
    attention = halo_attention if uses_halo else METHODS[method]
    # XLA for CPU does not order collectives in a loop, and its devices could then wait for each
    # other forever.
    unroll = {"unroll": target_device().platform == "cpu"} if attention is ring_attention else {}
    return partial(attention, axis="sequence", impl=attention_impl(attend), **unroll)


def attention_impl(attend: Callable[..., Any]) -> Impl:
    """Return the `impl` of a sink_attention. Raises ValueError for another function."""
    if attend is sink_attention:
        return "auto"
    if isinstance(attend, partial) and attend.func is sink_attention:
        if not attend.args and attend.keywords.keys() == {"impl"}:
            return attend.keywords["impl"]
    raise ValueError(
        "Ops.attend must be sink_attention, optionally with impl=, when the tokens of a row are "
        f"sharded; got {attend!r}. Use mesh.sequence=1 with a custom attention."
    )
