# SPDX-License-Identifier: Apache-2.0
"""The operations of the model in one value: every op of the forward and of the head is a field.

Training, sampling and scoring take an `Ops` and have no operations of their own, so that another
attention, a replaying router or sharded experts are one `replace`:

    ops = replace(make_ops(cfg), attend=my_attention)

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
from jaxmoe.model.check_ops import check_router
from jaxmoe.model.layers import (
    add_residual,
    embed_tokens,
    head_logits,
    keep_sampled_logprobs,
    linear,
    rms_norm,
    target_logprobs,
    token_divergences,
)
from jaxmoe.model.moe.experts import apply_experts, make_chunked_experts
from jaxmoe.model.moe.router import record_experts, route_top_k
from jaxmoe.model.moe.routers_from_config import (
    engine_router_from_config,
    record_from_config,
    router_from_config,
)
from jaxmoe.model.rope import apply_rope, rope_tables
from pallas_kernels import (
    decode_attention,
    grouped_matmul,
    grouped_swiglu,
    sink_attention,
    token_logprobs,
)
from pallas_kernels.check.choice import invariant_impls, requested_impls
from pallas_kernels.dispatch import Impl
from pallas_kernels.sink_attention.common import CHECKPOINT_NAMES
from pallas_kernels.token_logprobs import listed_logits

ArrayPair = tuple[Array, Array]
INPUT_NAME = "layer_period_input"  # the name that a jax.checkpoint policy selects it by


@dataclass(frozen=True)
class Ops:
    """The ops; each has the signature of the function named in its comment."""

    embed: Callable[..., Array]  # jaxmoe.model.layers.embed_tokens
    norm: Callable[..., Array]  # rms_norm
    linear: Callable[..., Array]  # linear, into q, k and v
    output: Callable[..., Array]  # linear, out of attention: it sums over heads
    rotary: Callable[..., ArrayPair]  # jaxmoe.model.rope.rope_tables
    rotate: Callable[..., Array]  # jaxmoe.model.rope.apply_rope, of q and of k
    attend: Callable[..., ArrayPair]  # pallas_kernels.sink_attention
    # pallas_kernels.decode_attention: `attend` for a few queries and a cache, without a gradient.
    # Replace both or neither.
    decode: Callable[..., ArrayPair]
    # moe.router.route_top_k, or replay_routing, or one of soft_routing that returns all experts.
    # It also gets `indices_BTA` if experts are replayed, and `context` (RouterContext) if it has
    # such a parameter.
    router: Callable[..., ArrayPair]
    experts: Callable[..., Array]  # jaxmoe.model.moe.experts.apply_experts
    # moe.router.record_experts: arrays [B, T, …] of each layer that a forward returns, by names
    # that end in their axes
    record: Callable[..., dict[str, Array]]
    add: Callable[..., Array]  # layers.add_residual
    logits: Callable[..., Array]  # layers.head_logits: over the vocabulary, for the next token
    logprobs: Callable[..., tuple[Array, ...]]  # layers.target_logprobs: of given tokens
    divergences: Callable[..., ArrayPair]  # layers.token_divergences: from a teacher
    # pallas_kernels.token_logprobs.listed_logits: of a teacher's words, and of all others as one
    listed_logits: Callable[..., ArrayPair]
    # layers.keep_sampled_logprobs: the log-prob and log of the kept mass that a rollout stores
    sampled_logprobs: Callable[..., Any]
    # Rematerialization of a period of layers: no_remat; jax.checkpoint, which saves its input and
    # recomputes the rest in the backward pass; checkpoint_keeping_attention; or
    # checkpoint_inputs_on_host.
    remat: Callable[[Callable[..., Any]], Callable[..., Any]]


def plain_ops() -> Ops:
    """Return the ops of a single device."""
    return Ops(
        embed=embed_tokens,
        norm=rms_norm,
        linear=linear,
        output=linear,
        rotary=rope_tables,
        rotate=apply_rope,
        attend=sink_attention,
        decode=decode_attention,
        router=route_top_k,
        experts=apply_experts,
        record=record_experts,
        add=add_residual,
        logits=head_logits,
        logprobs=target_logprobs,
        divergences=token_divergences,
        listed_logits=listed_logits,
        sampled_logprobs=keep_sampled_logprobs,
        remat=no_remat,
    )


def make_ops(cfg: Config, impls: Mapping[str, Impl] | None = None) -> Ops:
    """Return the trainer's ops; every command calls this once.

    `impls` maps each operation of pallas_kernels to the implementation that a check on this
    accelerator selected (jaxmoe/run/kernels.py). Without it they are those that cfg.kernels names,
    unchecked.
    """
    router = router_from_config(cfg.router)
    return _ops_with_router(cfg, impls, router)


def make_engine_ops(cfg: Config, impls: Mapping[str, Impl] | None = None) -> Ops | None:
    """Return the ops with which the native engine samples, or None if they are the trainer's."""
    router = engine_router_from_config(cfg.router, cfg.seed)
    return None if router is None else _ops_with_router(cfg, impls, router)


def _ops_with_router(
    cfg: Config, impls: Mapping[str, Impl] | None, router: Callable[..., Any]
) -> Ops:
    is_invariant = cfg.model.numerics == "invariant"
    if impls is None:
        impls = (invariant_impls if is_invariant else requested_impls)(cfg.kernels)
    ops = replace(
        with_kernels(plain_ops(), impls),
        router=router,
        record=record_from_config(cfg.router, cfg.model.experts_per_token),
        remat=remat_fn(cfg.optim),
    )
    check_router(ops.router, cfg.model)
    if is_invariant:
        ops = invariant_ops(ops, impls["sink_attention"])
    # Chunks come last, because they wrap whichever experts were chosen above.
    if cfg.optim.expert_tokens:
        ops = replace(ops, experts=make_chunked_experts(ops.experts, cfg.optim.expert_tokens))
    return ops


def invariant_ops(ops: Ops, impl: Impl = "xla_invariant") -> Ops:
    """Return batch-invariant ops: a token's bits depend on its own prefix alone.

    embed, record and remat are those of `ops`. With mosaic_gpu_invariant or mosaic_tpu_invariant
    they are for such an accelerator, with xla_invariant for a CPU.
    Raises: ValueError for another implementation.
    """
    name = impl if isinstance(impl, str) else impl[0]
    if name == "xla_invariant":
        return replace(ops, **invariant.xla_invariant_ops(ops.router))
    if name not in ("mosaic_gpu_invariant", "mosaic_tpu_invariant"):
        raise ValueError(
            f"impl must name a batch-invariant implementation, got {name!r}. Try xla_invariant, "
            "mosaic_gpu_invariant or mosaic_tpu_invariant."
        )
    return replace(ops, **invariant_on_chip.mosaic_invariant_ops(ops.router, impl))


def with_kernels(ops: Ops, impls: Mapping[str, Impl]) -> Ops:
    """Return the ops with other implementations, by operation; "auto" leaves an op unchanged."""

    def with_impl(operation: Callable[..., Any]) -> Callable[..., Any]:
        impl = impls.get(operation.__name__, "auto")
        return operation if impl == "auto" else partial(operation, impl=impl)

    # An op that stays at "auto" is not wrapped, so that with all of them at "auto" the ops are
    # unchanged.
    selected = {name: impl for name, impl in impls.items() if impl != "auto"}
    updated = ops
    if "sink_attention" in selected:
        updated = replace(updated, attend=with_impl(sink_attention))
    if "decode_attention" in selected:
        updated = replace(updated, decode=with_impl(decode_attention))
    if "token_logprobs" in selected:
        updated = replace(
            updated, logprobs=partial(target_logprobs, per_token=with_impl(token_logprobs))
        )
    if selected.keys() & {"grouped_swiglu", "grouped_matmul"}:
        experts_fn = partial(
            apply_experts, gate_up=with_impl(grouped_swiglu), down=with_impl(grouped_matmul)
        )
        updated = replace(updated, experts=experts_fn)
    return updated


def remat_fn(cfg: OptimConfig) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the rematerialization that the config names."""
    if not cfg.remat:
        return no_remat
    keeps_attention = cfg.remat_keeps == "attention"
    if cfg.remat_inputs == "host":
        return partial(checkpoint_inputs_on_host, keeps=CHECKPOINT_NAMES if keeps_attention else ())
    return checkpoint_keeping_attention if keeps_attention else jax.checkpoint


def checkpoint_keeping_attention(layers: Callable[..., Any]) -> Callable[..., Any]:
    """jax.checkpoint that also saves (o, lse) of each attention, and so never recomputes them.

    It needs an `attend` that names its results, as sink_attention does in every implementation but
    the reference, which JAX differentiates.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    return jax.checkpoint(layers, policy=policy)


def checkpoint_inputs_on_host(
    layers: Callable[..., Any], keeps: Sequence[str] = ()
) -> Callable[..., Any]:
    """jax.checkpoint whose inputs are offloaded to host memory; results named in `keeps` stay.

    `layers` is a function (carry, scanned) as in lax.scan; the carry is offloaded.
    """

    def run_named(carry: Any, scanned: Any) -> Any:
        # A policy of jax.checkpoint selects values by their names, and a carry has none.
        return layers(jax.tree.map(lambda x: checkpoint_name(x, INPUT_NAME), carry), scanned)

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(keeps),
        names_which_can_be_offloaded=[INPUT_NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(run_named, policy=policy)


def no_remat(layers: Callable[..., Any]) -> Callable[..., Any]:
    return layers
