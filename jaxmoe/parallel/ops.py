# SPDX-License-Identifier: Apache-2.0
"""The pieces of the forward on a mesh: each is the one-device piece inside a `shard_map`.

`forward` stays as it is and sees whole arrays; every piece that reads weights or looks beyond its
own token says here what each device holds of its arguments and results. Weights are gathered at
the piece that reads them, inside the scan over layers: one layer is whole at a time.
Next: gather.py; sequence.py and expert.py for what travels between devices.
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
from jaxmoe.model.check_ops import OnEachDevice
from jaxmoe.model.ops import Ops, plain_ops
from jaxmoe.model.params import Spec, param_specs
from jaxmoe.parallel import vocabulary
from jaxmoe.parallel.expert import dispatch_for
from jaxmoe.parallel.gather import gathered
from jaxmoe.parallel.halo import halo
from jaxmoe.parallel.ring import ring
from jaxmoe.parallel.sequence import unzigzag, zigzag
from jaxmoe.parallel.sharding import (
    AXES,
    TRAINING,
    MeshRules,
    Names,
    only_cutting,
    partition,
    shards_of,
    spec_of,
)
from jaxmoe.parallel.ulysses import ulysses
from jaxmoe.shapes import Params
from pallas_kernels import sink_attention
from pallas_kernels.dispatch import Impl, target_device

_TENSOR: Names = ("tensor",)
WAYS = {"ring": ring, "zigzag": ring, "ulysses": ulysses}  # of a layer without a window


def sharded_ops(
    ops: Ops, mesh: Mesh | None, cfg: ModelConfig, rules: MeshRules = TRAINING,
    across: str = "ring",
) -> Ops:  # fmt: skip
    """The same pieces for parameters and tokens that lie on a mesh as `rules` says.

    As they are without a mesh. A piece of one's own goes into `ops` and is wrapped like the
    others; it gets one device's share of rows and tokens, and whole weights. Two get a piece of
    theirs, and the tokens of all who have the others: `embed` of the width, `logits` of the words.
    `across` names one of WAYS, for rows whose tokens are cut.
    Raises ValueError where they are and `ops.attend` is not sink_attention, which the ways are of.
    """
    if mesh is None:
        return ops
    on, plain = OnMesh(mesh, cfg, rules, across), plain_ops()
    if shards_of(mesh, rules.time) > 1:
        implementation(ops.attend)
    # what sees a token by itself is XLA's to place, but for a piece of one's own
    own = {
        name: OnEachDevice(getattr(on, name), getattr(ops, name))
        for name in ("norm", "rotary", "rotate", "drawn")
        if getattr(ops, name) is not getattr(plain, name)
    }
    return replace(
        ops,
        **own,
        embed=OnEachDevice(on.embed, ops.embed),
        linear=OnEachDevice(on.linear, ops.linear),
        output=OnEachDevice(on.output, ops.output),
        attend=OnEachDevice(on.attend, ops.attend),
        decode=OnEachDevice(on.attend, ops.decode),
        router=OnEachDevice(on.router, ops.router),
        experts=OnEachDevice(on.experts, ops.experts),
        logits=OnEachDevice(on.logits, ops.logits),
        logprobs=OnEachDevice(on.logprobs, ops.logprobs),
    )


def implementation(attend: Callable[..., Any]) -> Impl:
    """The `impl` of a sink_attention. Raises ValueError for another function."""
    if attend is sink_attention:
        return "auto"
    if isinstance(attend, partial) and attend.func is sink_attention:
        if not attend.args and attend.keywords.keys() == {"impl"}:
            return attend.keywords["impl"]
    raise ValueError(
        "Ops.attend must be sink_attention where the tokens of a row are on several devices, "
        f"with its impl= or without; got {attend!r}. Try mesh.sequence=1 for an attention of your "
        "own."
    )


@dataclass(frozen=True)
class OnMesh:
    """What the wrapped pieces know of the mesh."""

    mesh: Mesh
    cfg: ModelConfig
    rules: MeshRules
    across: str

    @property
    def tokens(self) -> tuple[Names, Names]:
        """What cuts [B, T] of activations."""
        return self.rules.rows, self.rules.time

    def cut(self, spec: Spec) -> tuple[Names, ...]:
        """Of each dimension of a parameter, of one layer if stacked, what cuts it."""
        names = partition(spec.axes, spec.shape, self.mesh.shape, self.rules.rules)
        return names[1:] if spec.axes[0] == "pair" else names

    def run(self, fn: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """fn in a shard_map over the axes that cut something: XLA for CPU keeps sums over one."""
        mesh = only_cutting(self.mesh)

        def kept(spec: P) -> P:
            each = ((cut,) if isinstance(cut, str) else cut or () for cut in spec)
            return spec_of(*(tuple(n for n in names if n in mesh.shape) for names in each))

        ins, outs = jax.tree.map(kept, (ins, outs), is_leaf=lambda x: isinstance(x, P))
        return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)

    def embed(
        self, inner: Callable[..., Array], tokens_BT: Array, w_VD: Array, dtype: str
    ) -> Array:
        """`inner` gets the tokens of several devices and a piece of the width."""
        over = self.cut(self.specs["embed"])
        local = partial(vocabulary.embed, dtype=dtype, axes=over[1], lookup=inner)
        ins = spec_of(*self.tokens), spec_of(*over)
        return self.run(local, ins, spec_of(*self.tokens))(tokens_BT, w_VD)

    def norm(self, inner: Callable[..., Array], x_BTD: Array, scale_D: Array, eps: float) -> Array:
        tokens = spec_of(*self.tokens)
        run = self.run(lambda x_btD, scale_D: inner(x_btD, scale_D, eps), (tokens, P()), tokens)
        return run(x_BTD, scale_D)

    def rotary(
        self, inner: Callable[..., tuple[Array, Array]], positions_BT: Array, cfg: ModelConfig
    ) -> tuple[Array, Array]:
        tokens = spec_of(*self.tokens)
        return self.run(partial(inner, cfg=cfg), (tokens,), (tokens, tokens))(positions_BT)

    def rotate(
        self, inner: Callable[..., Array], x_BTNH: Array, tables: tuple[Array, Array]
    ) -> Array:
        heads, tokens = spec_of(*self.tokens, _TENSOR), spec_of(*self.tokens)
        return self.run(inner, (heads, (tokens, tokens)), heads)(x_BTNH, tables)

    def linear(self, inner: Callable[..., Array], x_BTD: Array, w_DF: Array, b_F: Array) -> Array:
        """Columns that tensor cuts stay cut: they are heads."""
        cut_D, cut_F = self.weight(("embed", "heads"), w_DF)
        mine, rest = self.split(cut_F)

        def local(x_btD: Array, w_df: Array, b_f: Array) -> Array:
            return inner(x_btD, gathered(w_df, (cut_D, rest), x_btD.dtype), b_f)

        ins = spec_of(*self.tokens), spec_of(cut_D, cut_F), spec_of(mine)
        return self.run(local, ins, spec_of(*self.tokens, mine))(x_BTD, w_DF, b_F)

    def output(self, inner: Callable[..., Array], x_BTF: Array, w_FD: Array, b_D: Array) -> Array:
        """The sum over heads goes over tensor, too, in float32; one device adds the bias."""
        cut_F, cut_D = self.weight(("heads", "embed"), w_FD)
        mine, rest = self.split(cut_F)

        def local(x_btf: Array, w_fd: Array, b_D: Array) -> Array:
            w_fD = gathered(w_fd, (rest, cut_D), x_btf.dtype)
            if not mine:
                return inner(x_btf, w_fD, b_D)
            once = jnp.where(lax.axis_index("tensor") == 0, b_D, jnp.zeros_like(b_D))
            share = inner(x_btf, w_fD, once).astype(jnp.float32)
            return lax.psum(share, "tensor").astype(x_btf.dtype)

        ins = spec_of(*self.tokens, mine), spec_of(cut_F, cut_D), spec_of(())
        return self.run(local, ins, spec_of(*self.tokens))(x_BTF, w_FD, b_D)

    def attend(
        self, inner: Callable[..., Any], q: Array, k: Array, v: Array, sink_N: Array, *,
        window: int | None, **where: Array,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Each device its own rows and heads; tokens of a row meet as jaxmoe/parallel/sequence.py
        says."""
        heads, tokens = spec_of(*self.tokens, _TENSOR), spec_of(*self.tokens)
        names, shards = tuple(where), shards_of(self.mesh, self.rules.time)
        turned = shards > 1 and self.across == "zigzag" and window is None
        if shards > 1:
            way = halo if window is not None else WAYS[self.across]
            options = {"unroll": target_device().platform == "cpu"} if way is ring else {}
            inner = partial(way, axis="sequence", impl=implementation(inner), **options)

        def local(q: Array, k: Array, v: Array, sink_n: Array, *given: Array) -> Any:
            return inner(q, k, v, sink_n, window=window, **dict(zip(names, given, strict=True)))

        ins = (heads, heads, heads, spec_of(_TENSOR), *(tokens for _ in names))
        run, arrays = self.run(local, ins, (heads, heads)), (q, k, v, *where.values())
        if turned:
            arrays = tuple(zigzag(x, shards) for x in arrays)
        q, k, v, *places = arrays
        o, lse = run(q, k, v, sink_N, *places)
        return (unzigzag(o, shards), unzigzag(lse, shards)) if turned else (o, lse)

    def router(
        self, inner: Callable[..., Any], h_BTD: Array, layer: Params, *, active: int,
        **given: Array,
    ) -> tuple[Array, Array]:  # fmt: skip
        tokens, names = spec_of(*self.tokens), tuple(given)

        def local(h_btD: Array, cut: Params, *given: Array) -> Any:
            mine = self.whole(cut, h_btD.dtype)
            return inner(h_btD, mine, active=active, **dict(zip(names, given, strict=True)))

        read = {name: x for name, x in layer.items() if "router" in name}
        ins = tokens, self.layer_specs(read), *(tokens for _ in names)
        return self.run(local, ins, (tokens, tokens))(h_BTD, read, *given.values())

    def experts(
        self, inner: Callable[..., Array], h_BTD: Array, indices_BTA: Array, weights_BTA: Array,
        layer: Params, cfg: ModelConfig,
    ) -> Array:  # fmt: skip
        """Each device its own experts, of everybody's tokens: jaxmoe/parallel/expert.py."""
        tokens = spec_of(*self.tokens)
        read = {name: x for name, x in layer.items() if "expert" in self.layer[name].axes}
        over, sum_over = self.expert_shards

        def local(h_btD: Array, indices_btA: Array, weights_btA: Array, cut: Params) -> Array:
            mine = self.whole(cut, h_btD.dtype)
            if not over + sum_over:
                return inner(h_btD, indices_btA, weights_btA, mine, cfg)
            dispatch, _ = dispatch_for(
                target_device(), devices=self.mesh.size, shards=shards_of(self.mesh, over),
                active=indices_btA.shape[-1], decoding=h_BTD.shape[1] == 1,
            )  # fmt: skip
            return dispatch(
                h_btD, indices_btA, weights_btA, mine, cfg, over=over, sum_over=sum_over,
                experts=inner,
            )  # fmt: skip

        ins = tokens, tokens, tokens, self.layer_specs(read)
        return self.run(local, ins, tokens)(h_BTD, indices_BTA, weights_BTA, read)

    def logits(self, inner: Callable[..., Array], hidden_BD: Array, w_DV: Array) -> Array:
        """`inner` gets the rows of several devices and a piece of the vocabulary."""
        over, rows = self.cut(self.specs["head"]), self.rules.rows
        local = partial(vocabulary.logits, axes=over[1], copies=self.uncut_by(rows), product=inner)
        ins = spec_of(rows), spec_of(*over)
        return self.run(local, ins, spec_of(rows))(hidden_BD, w_DV)

    def logprobs(
        self, inner: Callable[..., Any], hidden_BTD: Array, w_DV: Array, targets_BT: Array, *,
        temperature: Any, vocab_size: int,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Over a streamed head; where `inner` is not ours, over a whole one."""
        over, tokens = self.cut(self.specs["head"]), spec_of(*self.tokens)
        impl = vocabulary.implementation(inner)

        def whole(hidden_btD: Array, w_Dv: Array, targets_bt: Array, temperature: Array) -> Any:
            one = ((0, 0), (0, 1))  # a row's last token, which `inner` leaves out, is elsewhere
            found = inner(
                jnp.pad(hidden_btD, (*one, (0, 0))), gathered(w_Dv, over, hidden_btD.dtype),
                jnp.pad(targets_bt, one), temperature=temperature, vocab_size=vocab_size,
            )  # fmt: skip
            return tuple(x[:, :-1] for x in found)

        def streamed(hidden_btD: Array, w_Dv: Array, targets_bt: Array, temperature: Array) -> Any:
            return vocabulary.target_logprobs(
                hidden_btD, w_Dv, targets_bt, temperature=temperature, vocab_size=vocab_size,
                axes=over[1],
                sequence_axis="sequence" if shards_of(self.mesh, self.rules.time) > 1 else None,
                copies=self.uncut_by((*self.rules.rows, *self.rules.time)),
                impl=impl or "auto",
            )  # fmt: skip

        ins = tokens, spec_of(*over), tokens, spec_of()
        run = self.run(streamed if impl else whole, ins, (tokens, tokens))
        return run(hidden_BTD, w_DV, targets_BT, jnp.asarray(temperature, jnp.float32))

    def drawn(
        self, inner: Callable[..., Any], logp_B: Array, log_kept_B: Array | None,
        hidden_BD: Array, w_DV: Array, token_B: Array, *, temperature: Any, vocab_size: int,
    ) -> Any:  # fmt: skip
        """Over a whole head."""
        over, rows = self.cut(self.specs["head"]), spec_of(self.rules.rows)

        def local(
            logp_b: Array, log_kept_b: Array | None, hidden_bD: Array, w_dv: Array,
            token_b: Array, temperature: Array,
        ) -> Any:  # fmt: skip
            w_DV = gathered(w_dv, over, hidden_bD.dtype)
            return inner(
                logp_b, log_kept_b, hidden_bD, w_DV, token_b, temperature=temperature,
                vocab_size=vocab_size,
            )  # fmt: skip

        run = self.run(local, (rows, rows, rows, spec_of(*over), rows, P()), rows)
        return run(
            logp_B, log_kept_B, hidden_BD, w_DV, token_B, jnp.asarray(temperature, jnp.float32)
        )

    @property
    def specs(self) -> Params:
        return param_specs(self.cfg)

    @property
    def layer(self) -> dict[str, Spec]:
        """Of one kind of layer; both have the same."""
        return self.specs["layers"]["full"]

    def uncut_by(self, names: Names) -> Names:
        """Axes along which devices hold the same, where these cut."""
        return tuple(n for n in AXES if self.mesh.shape[n] > 1 and n not in names)

    def weight(self, axes: tuple[str, str], w: Array) -> tuple[Names, Names]:
        """What cuts a matrix of these logical axes."""
        first, last = partition(axes, w.shape, self.mesh.shape, self.rules.rules)
        return first, last

    def split(self, names: Names) -> tuple[Names, Names]:
        """What stays cut, which is tensor, and what is gathered; tensor stands first."""
        kept = tuple(name for name in names if name == "tensor")
        return kept, names[len(kept) :]

    @property
    def expert_shards(self) -> tuple[Names, Names]:
        """What cuts experts and tokens alike, and what cuts experts alone."""
        cut = self.cut(self.layer["w_gate_up"])[0]
        over = tuple(name for name in cut if name in sum(self.tokens, ()))
        return over, cut[len(over) :]

    def layer_specs(self, layer: Params) -> Params:
        return {name: spec_of(*self.cut(self.layer[name])) for name in layer}

    def whole(self, cut: Params, dtype: Any) -> Params:
        """Parameters of a layer, gathered but for experts, each in the dtype it is read in."""

        def of(name: str, x: Array) -> Array:
            spec = self.layer[name]
            axes = spec.axes[1:] if spec.axes[0] == "pair" else spec.axes
            over = tuple(
                () if axis == "expert" else names
                for axis, names in zip(axes, self.cut(spec), strict=True)
            )
            return gathered(x, over, dtype if spec.read == "compute" else x.dtype)

        return {name: of(name, x) for name, x in cut.items()}
