# SPDX-License-Identifier: Apache-2.0
"""The ops of the forward on a mesh: each is the one-device op inside a `shard_map`.

`forward` is unchanged and sees global arrays. Every op that reads weights, or looks beyond its own
token, declares here how its arguments and results are sharded. Weights are gathered by the op that
reads them, inside the scan over layers, so only one layer is unsharded at a time.
Next: head_ops.py; gather.py; sequence.py and expert.py for what travels between devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmoe.config import ModelConfig
from jaxmoe.model.moe.router import RouterContext, WrappedOp
from jaxmoe.model.ops import Ops, plain_ops
from jaxmoe.model.params import Spec, block_specs, param_specs
from jaxmoe.parallel import vocabulary
from jaxmoe.parallel.attention import attend_over_shards, attention_impl
from jaxmoe.parallel.expert import choose_dispatch
from jaxmoe.parallel.gather import gather_param
from jaxmoe.parallel.head_ops import HeadOps
from jaxmoe.parallel.rounding import gather_packed, matrix_specs
from jaxmoe.parallel.sequence import unzigzag, zigzag
from jaxmoe.parallel.sharding import (
    TRAINING,
    MeshRules,
    Names,
    check_batch_shape,
    count_shards,
    map_shards,
    mesh_spec,
    partition_axes,
)
from jaxmoe.shapes import Params
from pallas_kernels.dispatch import target_device
from pallas_kernels.grouped_matmul import Mxfp4

_TENSOR: Names = ("tensor",)


def sharded_ops(
    ops: Ops,
    mesh: Mesh | None,
    cfg: ModelConfig,
    rules: MeshRules = TRAINING,
    method: str = "ring",
) -> Ops:
    """Return the ops for parameters and tokens that are sharded over a mesh as `rules` says.

    Without a mesh they are `ops` unchanged. Custom ops go into `ops` and are wrapped like the
    others: they receive one device's rows and tokens, and unsharded weights. There are two
    exceptions: `embed` receives a shard of the width and `logits` a shard of the vocabulary; both
    see the tokens gathered over the remaining axes. `method` names one of attention.METHODS, for
    rows whose tokens are sharded. Raises ValueError if tokens are sharded and `ops.attend` is not
    sink_attention.
    """
    if mesh is None:
        return ops
    mesh_ops, defaults = MeshOps(mesh, cfg, rules, method), plain_ops()
    head_ops = HeadOps(mesh, cfg, rules)
    if count_shards(mesh, rules.time) > 1:
        # A custom attention raises before anything is traced.
        attention_impl(ops.attend)
    # XLA partitions ops that see single tokens by itself; only custom ones need a shard_map.
    single_token_ops = {
        "norm": mesh_ops.norm,
        "rotary": mesh_ops.rotary,
        "rotate": mesh_ops.rotate,
        "sampled_logprobs": head_ops.sampled_logprobs,
    }
    replaced = {
        name: WrappedOp(run_on_mesh, getattr(ops, name))
        for name, run_on_mesh in single_token_ops.items()
        if getattr(ops, name) is not getattr(defaults, name)
    }
    return replace(
        ops,
        **replaced,
        embed=WrappedOp(mesh_ops.embed, ops.embed),
        linear=WrappedOp(mesh_ops.linear, ops.linear),
        output=WrappedOp(mesh_ops.output, ops.output),
        attend=WrappedOp(mesh_ops.attend, ops.attend),
        decode=WrappedOp(mesh_ops.attend, ops.decode),
        router=WrappedOp(mesh_ops.router, ops.router),
        experts=WrappedOp(mesh_ops.experts, ops.experts),
        logits=WrappedOp(head_ops.logits, ops.logits),
        logprobs=WrappedOp(head_ops.logprobs, ops.logprobs),
        divergences=WrappedOp(head_ops.divergences, ops.divergences),
        listed_logits=WrappedOp(head_ops.listed_logits, ops.listed_logits),
    )


@dataclass(frozen=True)
class MeshOps:
    """The wrapped ops, one method for each op, and how their arrays are sharded."""

    mesh: Mesh
    cfg: ModelConfig
    rules: MeshRules
    method: str

    @property
    def tokens(self) -> tuple[Names, Names]:
        """Mesh axes that shard [B, T] of activations."""
        return self.rules.rows, self.rules.time

    def cut_axes(self, spec: Spec) -> tuple[Names, ...]:
        """Return the mesh axes of each dimension of a parameter."""
        return partition_axes(spec.axes, spec.shape, self.mesh.shape, self.rules.rules)

    def run_sharded(self, fn: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """Return fn in a shard_map over this mesh."""
        return map_shards(fn, self.mesh, ins, outs)

    def embed(
        self, inner: Callable[..., Array], tokens_BT: Array, w_VD: Array, dtype: str
    ) -> Array:
        """Look up the tokens of several devices in a shard of the width."""
        check_batch_shape(tokens_BT.shape, self.mesh, self.rules)
        cuts = self.cut_axes(param_specs(self.cfg)["embed"])
        run_shard = partial(vocabulary.embed_sharded, dtype=dtype, axes=cuts[1], lookup=inner)
        ins = mesh_spec(*self.tokens), mesh_spec(*cuts)
        return self.run_sharded(run_shard, ins, mesh_spec(*self.tokens))(tokens_BT, w_VD)

    def norm(self, inner: Callable[..., Array], x_BTD: Array, scale_D: Array, eps: float) -> Array:
        tokens = mesh_spec(*self.tokens)
        run = self.run_sharded(
            lambda x_btD, scale_D: inner(x_btD, scale_D, eps), (tokens, P()), tokens
        )
        return run(x_BTD, scale_D)

    def rotary(
        self, inner: Callable[..., tuple[Array, Array]], positions_BT: Array, cfg: ModelConfig
    ) -> tuple[Array, Array]:
        tokens = mesh_spec(*self.tokens)
        return self.run_sharded(partial(inner, cfg=cfg), (tokens,), (tokens, tokens))(positions_BT)

    def rotate(
        self, inner: Callable[..., Array], x_BTNH: Array, tables: tuple[Array, Array]
    ) -> Array:
        heads, tokens = mesh_spec(*self.tokens, _TENSOR), mesh_spec(*self.tokens)
        return self.run_sharded(inner, (heads, (tokens, tokens)), heads)(x_BTNH, tables)

    def linear(self, inner: Callable[..., Array], x_BTD: Array, w_DF: Array, b_F: Array) -> Array:
        """Apply `inner`; columns that tensor shards, which are heads, stay sharded."""
        cut_D, cut_F = self.weight_axes(("embed", "heads"), w_DF)
        tensor_F, gathered_F = self.split_tensor_axis(cut_F)

        def run_shard(x_btD: Array, w_df: Array, b_f: Array) -> Array:
            return inner(x_btD, gather_param(w_df, (cut_D, gathered_F), x_btD.dtype), b_f)

        ins = mesh_spec(*self.tokens), mesh_spec(cut_D, cut_F), mesh_spec(tensor_F)
        return self.run_sharded(run_shard, ins, mesh_spec(*self.tokens, tensor_F))(x_BTD, w_DF, b_F)

    def output(self, inner: Callable[..., Array], x_BTF: Array, w_FD: Array, b_D: Array) -> Array:
        """Sum over heads, also over tensor, in float32; one device adds the bias."""
        cut_F, cut_D = self.weight_axes(("heads", "embed"), w_FD)
        tensor_F, gathered_F = self.split_tensor_axis(cut_F)

        def run_shard(x_btf: Array, w_fd: Array, b_D: Array) -> Array:
            w_fD = gather_param(w_fd, (gathered_F, cut_D), x_btf.dtype)
            if not tensor_F:
                return inner(x_btf, w_fD, b_D)
            # The sum over tensor would otherwise add the bias once for each device.
            bias_D = jnp.where(lax.axis_index("tensor") == 0, b_D, jnp.zeros_like(b_D))
            share = inner(x_btf, w_fD, bias_D).astype(jnp.float32)
            return lax.psum(share, "tensor").astype(x_btf.dtype)

        ins = (mesh_spec(*self.tokens, tensor_F), mesh_spec(cut_F, cut_D), mesh_spec(()))
        return self.run_sharded(run_shard, ins, mesh_spec(*self.tokens))(x_BTF, w_FD, b_D)

    def attend(
        self,
        inner: Callable[..., Any],
        q: Array,
        k: Array,
        v: Array,
        sink_N: Array,
        *,
        window: int | None,
        **layout: Array,
    ) -> tuple[Array, Array]:
        """Attend with each device's own rows and heads. Sharded tokens of a row are combined by a
        method of jaxmoe/parallel/sequence.py."""
        heads, tokens = mesh_spec(*self.tokens, _TENSOR), mesh_spec(*self.tokens)
        # shard_map takes positional arguments only.
        names, shards = tuple(layout), count_shards(self.mesh, self.rules.time)
        # Layers with a window need consecutive tokens, so each full layer reorders its own inputs
        # and restores the order of its outputs.
        is_zigzag = shards > 1 and self.method == "zigzag" and window is None
        if shards > 1:
            inner = attend_over_shards(inner, self.method, window, names)

        def run_shard(q: Array, k: Array, v: Array, sink_n: Array, *layout_arrays: Array) -> Any:
            return inner(
                q, k, v, sink_n, window=window, **dict(zip(names, layout_arrays, strict=True))
            )

        ins = (heads, heads, heads, mesh_spec(_TENSOR), *(tokens for _ in names))
        run, arrays = self.run_sharded(run_shard, ins, (heads, heads)), (q, k, v, *layout.values())
        if is_zigzag:
            arrays = tuple(zigzag(x, shards) for x in arrays)
        q, k, v, *layout_arrays = arrays
        o, lse = run(q, k, v, sink_N, *layout_arrays)
        return (unzigzag(o, shards), unzigzag(lse, shards)) if is_zigzag else (o, lse)

    def router(
        self,
        inner: Callable[..., Any],
        h_BTD: Array,
        layer: Params,
        *,
        active: int,
        context: RouterContext | None = None,
        **replay_options: Array,
    ) -> tuple[Array, Array]:
        tokens, names = mesh_spec(*self.tokens), tuple(replay_options)

        def run_shard(
            h_btD: Array, shards: Params, context: RouterContext | None, *replay_arrays: Array
        ) -> Any:
            params = self.gather_layer(shards, h_btD.dtype)
            options: dict[str, Any] = dict(zip(names, replay_arrays, strict=True))
            if context is not None:
                options["context"] = context
            return inner(h_btD, params, active=active, **options)

        # The shard_map gathers every parameter that it receives, so it receives only those that are
        # read.
        read = {name: x for name, x in layer.items() if "router" in name}
        replicated = jax.tree.map(lambda _: P(), context)
        ins = tokens, self.layer_specs(read), replicated, *(tokens for _ in names)
        return self.run_sharded(run_shard, ins, (tokens, tokens))(
            h_BTD, read, context, *replay_options.values()
        )

    def experts(
        self,
        inner: Callable[..., Array],
        h_BTD: Array,
        indices_BTA: Array,
        weights_BTA: Array,
        layer: Params,
        cfg: ModelConfig,
    ) -> Array:
        """Apply each device's experts to the tokens of all: jaxmoe/parallel/expert.py."""
        tokens = mesh_spec(*self.tokens)
        read = {name: x for name, x in layer.items() if "expert" in self.layer[name].axes}
        axes, sum_axes = self.expert_shards

        def run_shard(
            h_btD: Array, indices_btA: Array, weights_btA: Array, shards: Params
        ) -> Array:
            params = self.gather_layer(shards, h_btD.dtype)
            if not axes + sum_axes:
                return inner(h_btD, indices_btA, weights_btA, params, cfg)
            dispatch, _ = choose_dispatch(
                target_device(),
                devices=self.mesh.size,
                shards=count_shards(self.mesh, axes),
                active=indices_btA.shape[-1],
                decoding=h_BTD.shape[1] == 1,
            )
            return dispatch(
                h_btD,
                indices_btA,
                weights_btA,
                params,
                cfg,
                axes=axes,
                sum_axes=sum_axes,
                experts=inner,
            )

        ins = tokens, tokens, tokens, self.layer_specs(read)
        return self.run_sharded(run_shard, ins, tokens)(h_BTD, indices_BTA, weights_BTA, read)

    @property
    def layer(self) -> dict[str, Spec]:
        """Specs of a layer, as the scan over stacks passes it to the ops."""
        return block_specs(self.cfg)

    def weight_axes(self, axes: tuple[str, str], w: Array) -> tuple[Names, Names]:
        """Return the mesh axes that shard a matrix of these logical axes."""
        first, last = partition_axes(axes, w.shape, self.mesh.shape, self.rules.rules)
        return first, last

    def split_tensor_axis(self, names: Names) -> tuple[Names, Names]:
        """Split axes into tensor, which stays sharded, and those to gather; tensor comes first."""
        kept_axes = tuple(name for name in names if name == "tensor")
        return kept_axes, names[len(kept_axes) :]

    @property
    def expert_shards(self) -> tuple[Names, Names]:
        """Axes that shard both experts and tokens, and axes that shard experts alone."""
        cut = self.cut_axes(self.layer["w_gate_up"])[0]
        axes = tuple(name for name in cut if name in sum(self.tokens, ()))
        return axes, cut[len(axes) :]

    def layer_specs(self, layer: Params) -> Params:
        cuts = {name: self.cut_axes(self.layer[name]) for name in layer}
        return {name: matrix_specs(x, cuts[name]) for name, x in layer.items()}

    def gather_layer(self, shards: Params, dtype: Any) -> Params:
        """Return a layer's parameters, gathered except for experts, each in the dtype it is read
        in."""

        def gather_one(name: str, x: Any) -> Any:
            spec = self.layer[name]
            if isinstance(x, Mxfp4):
                return gather_packed(x, self.cut_axes(spec), dtype)
            axes = tuple(
                () if axis == "expert" else names
                for axis, names in zip(spec.axes, self.cut_axes(spec), strict=True)
            )
            return gather_param(x, axes, dtype if spec.read == "compute" else x.dtype)

        return {name: gather_one(name, x) for name, x in shards.items()}
