# SPDX-License-Identifier: Apache-2.0
"""How the model runs, in one value: every piece of the forward and of the head is a function here.

Whatever trains, samples or scores takes an `Ops` and has no piece of its own, so that another
attention, a replaying router or a sharded expert layer is one `replace`:

    ops = replace(make_ops(cfg), attend=mine)

Next: jaxmoe/model/forward.py, which calls them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array

from jaxmoe.config import Config
from jaxmoe.model.experts import experts
from jaxmoe.model.layers import embed, linear, logits, rms_norm, target_logprobs
from jaxmoe.model.rope import rope_tables
from jaxmoe.model.router import chosen, replay, route
from pallas_kernels import sink_attention

Two = tuple[Array, Array]


@dataclass(frozen=True)
class Ops:
    """The pieces; each has the signature of the function named beside it."""

    embed: Callable[..., Array]  # jaxmoe.model.layers.embed
    norm: Callable[..., Array]  # rms_norm
    linear: Callable[..., Array]  # linear
    rotary: Callable[..., Two]  # jaxmoe.model.rope.rope_tables
    attend: Callable[..., Two]  # pallas_kernels.sink_attention
    router: Callable[..., Two]  # jaxmoe.model.router.route, or replay
    experts: Callable[..., Array]  # jaxmoe.model.experts.experts
    record: Callable[..., Any]  # jaxmoe.model.router.chosen: what a forward keeps of each layer
    logits: Callable[..., Array]  # layers.logits: over the vocabulary, for the next token
    logprobs: Callable[..., tuple[Array, ...]]  # layers.target_logprobs: of tokens that are there
    remat: Callable[[Callable[..., Any]], Callable[..., Any]]  # of a layer pair: as_is, or
    # jax.checkpoint, which keeps its input and recomputes the rest in the backward pass


def plain_ops() -> Ops:
    """Every piece as one device computes it."""
    return Ops(
        embed=embed, norm=rms_norm, linear=linear, rotary=rope_tables, attend=sink_attention,
        router=route, experts=experts, record=chosen, logits=logits, logprobs=target_logprobs,
        remat=as_is,
    )  # fmt: skip


def make_ops(cfg: Config) -> Ops:
    """The pieces of a run; every command makes them here, once."""
    return replace(
        plain_ops(),
        router=replay if cfg.rollout.router_replay else route,
        remat=jax.checkpoint if cfg.optim.remat else as_is,
    )


def as_is(layer_pair: Callable[..., Any]) -> Callable[..., Any]:
    return layer_pair
