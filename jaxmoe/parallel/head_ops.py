# SPDX-License-Identifier: Apache-2.0
"""The ops over the head on a mesh: logits, log-probs, divergences, and logits of listed words.

The default ops stream the head chunk by chunk (vocabulary.py, divergence.py), so that no device has
all of it; a custom one receives the unsharded head. Next: vocabulary.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmoe.config import ModelConfig
from jaxmoe.model import layers
from jaxmoe.model.params import param_specs
from jaxmoe.parallel import vocabulary
from jaxmoe.parallel.divergence import divergences_sharded, listed_logits_sharded
from jaxmoe.parallel.gather import gather_param
from jaxmoe.parallel.sharding import (
    AXES,
    MeshRules,
    Names,
    count_shards,
    map_shards,
    mesh_spec,
    partition_axes,
)
from pallas_kernels.token_logprobs import listed_logits

Op = Callable[..., Any]


@dataclass(frozen=True)
class HeadOps:
    """The wrapped ops that read the head, one method for each op."""

    mesh: Mesh
    cfg: ModelConfig
    rules: MeshRules

    def logits(self, inner: Op, hidden_BD: Array, w_DV: Array) -> Array:
        """Compute logits of the rows of several devices over a shard of the vocabulary."""
        cuts, rows = self.cut_head(w_DV), self.rules.rows
        run_shard = partial(
            vocabulary.head_logits_sharded,
            axes=cuts[1],
            copies=self.replicated_axes(rows),
            product=inner,
        )
        ins = mesh_spec(rows), mesh_spec(*cuts)
        return map_shards(run_shard, self.mesh, ins, mesh_spec(rows))(hidden_BD, w_DV)

    def logprobs(
        self, inner: Op, hidden_BTD: Array, w_DV: Array, targets_BT: Array, **options: Any
    ) -> tuple[Array, ...]:
        """Compute log-probs and entropies."""
        # One padding column, since `inner` drops the last column, and a row's last token may be on
        # another device.
        column = ((0, 0), (0, 1))

        def run_full(h_btD: Array, w_DV: Array, targets_bt: Array, **options: Any) -> Any:
            h_btD, targets_bt = jnp.pad(h_btD, (*column, (0, 0))), jnp.pad(targets_bt, column)
            return tuple(x[:, :-1] for x in inner(h_btD, w_DV, targets_bt, **options))

        impl = vocabulary.logprobs_impl(inner)
        streamed = partial(
            vocabulary.target_logprobs_sharded,
            # An axis of size 1 does not exist inside the shard_map.
            sequence_axis="sequence" if count_shards(self.mesh, self.rules.time) > 1 else None,
            impl=impl or "auto",
        )
        arrays = hidden_BTD, w_DV, targets_BT
        return self.map_tokens(run_full, streamed if impl else None, arrays, **options)

    def divergences(self, inner: Op, *arrays: Array, **options: Any) -> tuple[Array, Array]:
        """Compute divergences over two heads: (hidden states, head) of the policy, and of the
        teacher."""
        streamed = divergences_sharded if inner is layers.token_divergences else None
        return self.map_tokens(inner, streamed, arrays, **options)

    def listed_logits(self, inner: Op, *arrays: Array, **options: Any) -> tuple[Array, Array]:
        """Compute logits of listed words: (hidden states, head, ids)."""
        streamed = listed_logits_sharded if inner is listed_logits else None
        return self.map_tokens(inner, streamed, arrays, **options)

    def sampled_logprobs(
        self,
        inner: Op,
        logp_B: Array,
        log_kept_B: Array | None,
        hidden_BD: Array,
        w_DV: Array,
        token_B: Array,
        *,
        temperature: Any,
        vocab_size: int,
    ) -> Any:
        """Compute sampled log-probs with the unsharded head."""
        cuts, rows = self.cut_head(w_DV), mesh_spec(self.rules.rows)

        def run_shard(
            logp_b: Array,
            log_kept_b: Array | None,
            hidden_bD: Array,
            w_dv: Array,
            token_b: Array,
            temperature: Array,
        ) -> Any:
            w_DV, options = gather_param(w_dv, cuts, hidden_bD.dtype), {"vocab_size": vocab_size}
            arrays = logp_b, log_kept_b, hidden_bD, w_DV, token_b
            return inner(*arrays, temperature=temperature, **options)

        ins = rows, rows, rows, mesh_spec(*cuts), rows, P()
        return map_shards(run_shard, self.mesh, ins, rows)(
            logp_B, log_kept_B, hidden_BD, w_DV, token_B, jnp.asarray(temperature, jnp.float32)
        )

    def map_tokens(
        self,
        full: Op,
        streamed: Op | None,
        arrays: tuple[Array, ...],
        *,
        temperature: Any,
        vocab_size: int,
    ) -> Any:
        """Apply `streamed` to each device's tokens and its shards of the heads; if it is None,
        `full` to the unsharded heads.

        In `arrays` those of tokens and heads take turns.
        """
        cuts = [self.cut_head(w) for w in arrays[1::2]]

        def run_shard(*shards: Array) -> Any:
            *arrays, temperature = shards
            options = {"temperature": temperature, "vocab_size": vocab_size}
            if streamed is not None:
                copies = self.replicated_axes((*self.rules.rows, *self.rules.time))
                return streamed(*arrays, axes=cuts[0][1], copies=copies, **options)
            arrays[1::2] = [
                gather_param(w, cut, h.dtype)
                for h, w, cut in zip(arrays[::2], arrays[1::2], cuts, strict=False)
            ]
            return full(*arrays, **options)

        tokens = mesh_spec(self.rules.rows, self.rules.time)
        ins = [tokens for _ in arrays]
        ins[1::2] = [mesh_spec(*cut) for cut in cuts]
        run = map_shards(run_shard, self.mesh, (*ins, mesh_spec()), (tokens, tokens))
        return run(*arrays, jnp.asarray(temperature, jnp.float32))

    def cut_head(self, w_DV: Array) -> tuple[Names, ...]:
        """Return the mesh axes of each dimension of a head."""
        axes = param_specs(self.cfg)["head"].axes
        return partition_axes(axes, w_DV.shape, self.mesh.shape, self.rules.rules)

    def replicated_axes(self, names: Names) -> Names:
        """Return the axes along which devices have the same data, if `names` shard it."""
        return tuple(n for n in AXES if self.mesh.shape[n] > 1 and n not in names)
