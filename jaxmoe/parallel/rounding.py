# SPDX-License-Identifier: Apache-2.0
"""Experts in four bits on a mesh: rounded where their masters are, and gathered in four bits.

A group of 32 rows has one scale, and a byte has a row of each half of the matrix. So rows of packed
matrices are never sharded: the mesh axes that shard the rows of a master shard the columns of its
values. Before rounding, devices exchange rows for columns. A device sends no more than its own
shard, and has at no time more of the masters than that.
Next: jaxmoe/model/rounded.py; jaxmoe/parallel/ops.py reads the packed values.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, UInt8

from jaxmoe.config import Config, ModelConfig, require
from jaxmoe.config.quant import DENSE_EXPERTS
from jaxmoe.model.params import block_specs
from jaxmoe.model.rounded import MATRICES, map_experts
from jaxmoe.model.stacks import as_part
from jaxmoe.parallel.exchange import device_index
from jaxmoe.parallel.gather import Cuts, scatter_gradient
from jaxmoe.parallel.sharding import (
    RULES,
    Names,
    map_shards,
    mesh_spec,
    partition_axes,
)
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import Mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, mxfp4_to_dense
from pallas_kernels.grouped_matmul.rounded import is_above_largest

MapParams = Callable[[Params], Params]


def packed_cuts(cuts: Sequence[Names]) -> tuple[Names, ...]:
    """Return the mesh axes of each dimension of packed matrices, from those of their masters."""
    *stack, rows, columns = cuts
    return (*stack, (), columns + rows)


def check_rounded_mesh(cfg: Config) -> None:
    """Raise ConfigError if the columns of packed experts cannot be sharded as their masters' rows.

    Rows of packed experts are not sharded: a shard of them would cut groups of 32.
    """
    if cfg.quant.experts == "none":
        return
    specs = block_specs(cfg.model)
    for name, size in (("w_gate_up", "2 * model.d_expert"), ("w_down", "model.d_model")):
        spec = specs[name]
        names = packed_cuts(partition_axes(spec.axes, spec.shape, cfg.mesh.sizes))[-1]
        shards, width = math.prod(cfg.mesh.sizes[axis] for axis in names), spec.shape[-1]
        axes = " * ".join(f"mesh.{axis}" for axis in names)
        require(
            width % shards == 0,
            f"quant.experts={cfg.quant.experts} needs {axes} ({shards}) to divide {size} ({width}):"
            f" devices share the columns of {name}, since a shard of its rows would cut groups of "
            f"32. Try {' '.join(f'--set mesh.{axis}=1' for axis in names)}"
            f" --set mesh.data={shards * cfg.mesh.data}, or {DENSE_EXPERTS}.",
        )


def shard_rounding(
    round_params: MapParams | None, cfg: ModelConfig, mesh: Mesh | None
) -> MapParams | None:
    """Return `round_params` for parameters that are sharded for training; unchanged on one device.

    Each device rounds the columns that it gets by `exchange_rows_for_columns`. The values are those
    of one device to the bit, since rounding reads a group of rows of one column.
    """
    if round_params is None or mesh is None or mesh.size == 1:
        return round_params

    def round_sharded(params: Params) -> Params:
        cuts, placed = _master_cuts(cfg, mesh), exchange_rows_for_columns(params, cfg, mesh)
        experts = {
            "layers": {
                kind: {name: layer[name] for name in MATRICES if layer.get(name) is not None}
                for kind, layer in placed["layers"].items()
            }
        }
        specs = {
            "layers": {
                kind: {name: mesh_spec(*packed_cuts(cuts[name])) for name in layer}
                for kind, layer in experts["layers"].items()
            }
        }
        packed = map_shards(round_params, mesh, (specs,), specs)(experts)
        return map_experts(lambda _, values: values, params, packed)

    return round_sharded


def exchange_rows_for_columns(params: Params, cfg: ModelConfig, mesh: Mesh) -> Params:
    """Return the parameters with the experts' masters sharded as their packed values are."""
    cuts = _master_cuts(cfg, mesh)

    def exchange(name: str, w_EDF: Array) -> Array:
        rows = cuts[name][-2]
        if not rows:
            return w_EDF
        last = w_EDF.ndim - 1
        run = partial(
            lax.all_to_all, axis_name=rows, split_axis=last, concat_axis=last - 1, tiled=True
        )
        return map_shards(
            run, mesh, (mesh_spec(*cuts[name]),), mesh_spec(*packed_cuts(cuts[name]))
        )(w_EDF)

    layers = {
        kind: layer
        | {name: exchange(name, layer[name]) for name in MATRICES if layer.get(name) is not None}
        for kind, layer in params["layers"].items()
    }
    return params | {"layers": layers}


def matrix_specs(x: Leaf, cuts: Cuts) -> Leaf:
    """Return the PartitionSpecs of a layer's parameter; `cuts` are those of dense matrices."""
    if not isinstance(x, Mxfp4):
        return mesh_spec(*cuts)
    stack: Leaf = mesh_spec((), *packed_cuts(cuts))
    master: Leaf = None if x.master_EDF is None else mesh_spec(*cuts)
    index: Leaf = mesh_spec()
    return Mxfp4(stack, stack, index, master)


def gather_packed(x: Mxfp4, cuts: Cuts, dtype: DTypeLike) -> Leaf:
    """Return the matrices of this device's experts, unsharded otherwise; for `shard_map` bodies.

    They stay packed, and travel packed. Those with masters that had to be gathered are decoded, and
    their gradient goes to the shards of the masters as in `read_rounded`.
    """
    _, rows, columns = cuts
    if not (names := columns + rows):
        return as_part(x)
    shards = (lax.dynamic_index_in_dim(part, x.first, keepdims=False) for part in x.codes)
    gathered = Mxfp4(*(lax.all_gather(part, names, axis=2, tiled=True) for part in shards))
    if x.master_EDF is None:
        return gathered
    return _read_gathered(x.master_EDF, gathered, ((), rows, columns), jnp.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _read_gathered(master_edf: Array, packed: Mxfp4, cuts: Cuts, dtype: jnp.dtype) -> Array:
    return mxfp4_to_dense(packed, dtype)


def _read_forward(
    master_edf: Array, packed: Mxfp4, cuts: Cuts, dtype: jnp.dtype
) -> tuple[Array, Leaf]:
    return mxfp4_to_dense(packed, dtype), (master_edf, packed.scales_EDF)


def _read_backward(
    cuts: Cuts, dtype: jnp.dtype, saved: Leaf, grad_EDF: Array
) -> tuple[Array, Leaf]:
    master_edf, scales_EDF = saved
    grad_edf = scatter_gradient(grad_EDF, cuts)
    saturated = is_above_largest(master_edf, _own_scales(master_edf, scales_EDF, cuts))
    return jnp.where(saturated, 0, grad_edf).astype(master_edf.dtype), None


_read_gathered.defvjp(_read_forward, _read_backward)


def _own_scales(master_edf: Array, scales_EDF: Array, cuts: Cuts) -> UInt8[Array, "e d f"]:
    """Return the scale of each value of this device's shard, whose rows may cut a group."""
    _, rows, columns = cuts
    _, height, width = master_edf.shape
    first = device_index(rows) * height
    groups = (first + jnp.arange(height, dtype=jnp.int32)) // GROUP
    scale_edF = jnp.take(scales_EDF, groups, axis=1, mode="clip")
    return lax.dynamic_slice_in_dim(scale_edF, device_index(columns) * width, width, axis=2)


def _master_cuts(cfg: ModelConfig, mesh: Mesh) -> dict[str, tuple[Names, ...]]:
    """Return the mesh axes of each dimension of the experts' masters, stacked over layers."""
    specs = block_specs(cfg)
    return {
        name: ((), *partition_axes(specs[name].axes, specs[name].shape, mesh.shape, RULES))
        for name in MATRICES
    }
