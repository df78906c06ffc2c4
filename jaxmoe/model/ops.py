# SPDX-License-Identifier: Apache-2.0
"""How the model runs, in one value: every piece of the forward and of the head is a function here.

Whatever trains, samples or scores takes an `Ops` and has no piece of its own, so that another
attention, a replaying router or a sharded expert layer is one `replace`:

    ops = replace(make_ops(cfg), attend=mine)

Next: jaxmoe/model/forward.py, which calls them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxmoe.config import Config, OptimConfig
from jaxmoe.model import invariant, invariant_on_chip
from jaxmoe.model.experts import experts, in_chunks
from jaxmoe.model.layers import add, as_drawn, embed, linear, logits, rms_norm, target_logprobs
from jaxmoe.model.rope import rope_tables, rotate
from jaxmoe.model.router import chosen, replay, route
from pallas_kernels import (
    decode_attention,
    grouped_matmul,
    grouped_swiglu,
    sink_attention,
    token_logprobs,
)
from pallas_kernels.check.choice import wanted
from pallas_kernels.dispatch import Impl
from pallas_kernels.sink_attention.common import CHECKPOINT_NAMES

Two = tuple[Array, Array]
INPUT = "layer_pair_input"  # by which a policy of jax.checkpoint knows it


@dataclass(frozen=True)
class Ops:
    """The pieces; each has the signature of the function named beside it."""

    embed: Callable[..., Array]  # jaxmoe.model.layers.embed
    norm: Callable[..., Array]  # rms_norm
    linear: Callable[..., Array]  # linear, into q, k and v
    output: Callable[..., Array]  # linear, out of attention: its sum runs over heads
    rotary: Callable[..., Two]  # jaxmoe.model.rope.rope_tables
    rotate: Callable[..., Array]  # jaxmoe.model.rope.rotate, of q and of k
    attend: Callable[..., Two]  # pallas_kernels.sink_attention
    decode: Callable[..., Two]  # pallas_kernels.decode_attention: `attend` for a few queries and a
    # cache, without a gradient; who replaces one of the two replaces both
    router: Callable[..., Two]  # jaxmoe.model.router.route, or replay
    experts: Callable[..., Array]  # jaxmoe.model.experts.experts
    record: Callable[..., Any]  # jaxmoe.model.router.chosen: what a forward keeps of each layer
    add: Callable[..., Array]  # layers.add: to the residual stream
    logits: Callable[..., Array]  # layers.logits: over the vocabulary, for the next token
    logprobs: Callable[..., tuple[Array, ...]]  # layers.target_logprobs: of tokens that are there
    drawn: Callable[..., Any]  # layers.as_drawn: log-prob and kept mass that a rollout carries
    remat: Callable[[Callable[..., Any]], Callable[..., Any]]  # of a layer pair: as_is, or
    # jax.checkpoint, which keeps its input and recomputes the rest in the backward pass, or
    # keeping_attention, or inputs_on_host


def plain_ops() -> Ops:
    """Every piece as one device computes it."""
    return Ops(
        embed=embed, norm=rms_norm, linear=linear, output=linear, rotary=rope_tables,
        rotate=rotate, attend=sink_attention, decode=decode_attention, router=route,
        experts=experts, record=chosen, add=add, logits=logits, logprobs=target_logprobs,
        drawn=as_drawn, remat=as_is,
    )  # fmt: skip


def make_ops(cfg: Config, impls: Mapping[str, Impl] | None = None) -> Ops:
    """The pieces of a run; every command makes them here, once.

    `impls` says which implementation each operation of pallas_kernels runs, as a check on this
    chip chose (jaxmoe/kernels.py); without it they are those that cfg.kernels names, unchecked.
    """
    ops = replace(
        with_kernels(plain_ops(), wanted(cfg.kernels) if impls is None else impls),
        router=replay if cfg.rollout.router_replay else route,
        remat=remat_of(cfg.optim),
    )
    if cfg.model.numerics == "invariant":
        ops = invariant_ops(ops, (impls or wanted(cfg.kernels))["sink_attention"])
    if cfg.optim.expert_tokens:
        ops = replace(ops, experts=in_chunks(ops.experts, cfg.optim.expert_tokens))
    return ops


def invariant_ops(ops: Ops, kernels: Impl = "auto") -> Ops:
    """The pieces whose bits depend on a token's own past alone; embed, record and remat stay.

    On a CPU; with `kernels` mosaic_gpu or mosaic_tpu, on such a chip.
    """
    name = kernels if isinstance(kernels, str) else kernels[0]
    if name in ("mosaic_gpu", "mosaic_tpu"):
        return replace(ops, **invariant_on_chip.pieces(ops.router, name))
    return replace(ops, **invariant.pieces(ops.router))


def with_kernels(ops: Ops, impls: Mapping[str, Impl]) -> Ops:
    """The same pieces in other implementations, by operation; "auto" leaves a piece as it is."""

    def of(operation: Callable[..., Any]) -> Callable[..., Any]:
        impl = impls.get(operation.__name__, "auto")
        return operation if impl == "auto" else partial(operation, impl=impl)

    given = {name: impl for name, impl in impls.items() if impl != "auto"}
    made = ops
    if "sink_attention" in given:
        made = replace(made, attend=of(sink_attention))
    if "decode_attention" in given:
        made = replace(made, decode=of(decode_attention))
    if "token_logprobs" in given:
        made = replace(made, logprobs=partial(target_logprobs, per_token=of(token_logprobs)))
    if given.keys() & {"grouped_swiglu", "grouped_matmul"}:
        both = partial(experts, gate_up=of(grouped_swiglu), down=of(grouped_matmul))
        made = replace(made, experts=both)
    return made


def remat_of(cfg: OptimConfig) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What the config names."""
    if not cfg.remat:
        return as_is
    attention = cfg.remat_keeps == "attention"
    if cfg.remat_inputs == "host":
        return partial(inputs_on_host, keeps=CHECKPOINT_NAMES if attention else ())
    return keeping_attention if attention else jax.checkpoint


def keeping_attention(layer_pair: Callable[..., Any]) -> Callable[..., Any]:
    """jax.checkpoint that keeps (o, lse) of both attentions too, and never runs them again.

    Of an `attend` that names its results, as sink_attention does by every implementation but the
    reference, which JAX differentiates.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    return jax.checkpoint(layer_pair, policy=policy)


def inputs_on_host(layer_pair: Callable[..., Any], keeps: Sequence[str] = ()) -> Callable[..., Any]:
    """jax.checkpoint whose inputs wait in the hosts' memory; what is named in `keeps` does not.

    Of a function (carry, scanned), as lax.scan has it: the carry is what waits.
    """

    def named(carry: Any, scanned: Any) -> Any:
        return layer_pair(jax.tree.map(lambda x: checkpoint_name(x, INPUT), carry), scanned)

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(keeps), names_which_can_be_offloaded=[INPUT],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    return jax.checkpoint(named, policy=policy)


def as_is(layer_pair: Callable[..., Any]) -> Callable[..., Any]:
    return layer_pair
