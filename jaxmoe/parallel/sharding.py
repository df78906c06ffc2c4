# SPDX-License-Identifier: Apache-2.0
"""The one table from logical axes of parameters to axes of the mesh, and shardings made from it.

The mesh has five axes, of size 1 where they are not used:

    data      full copies of the model, with different rows
    fsdp      weights, gradients and moments are sharded, and gathered one layer at a time
    expert    experts are sharded, and tokens travel to them; other weights as for fsdp
    sequence  the tokens of a row are sharded; weights as for fsdp
    tensor    heads are sharded, and experts once more

Rows are sharded over data, fsdp and expert. An axis of a parameter is sharded over the mesh axes
that RULES names, in that order, as long as they divide it. Vectors are replicated, except along
heads: gathering them would cost more than storing them.
Next: jaxmoe/parallel/ops.py computes with these shardings.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MeshConfig, ModelConfig, OptimConfig
from jaxmoe.model.params import STACK, map_specs
from jaxmoe.shapes import Leaf, Params

AXES = ("data", "fsdp", "expert", "sequence", "tensor")
Names = tuple[str, ...]  # of mesh axes that shard one dimension, major first

RULES: Mapping[str, Names] = {
    # GPT-OSS's width, 2,880, divides by 64 and not by 128. So the two dimensions of a matrix are
    # sharded over different axes, whose product may be larger.
    "embed": ("fsdp", "sequence"),
    "heads": ("tensor", "expert"),
    "kv": ("tensor", "expert"),
    # expert.py requires the axis that also shards tokens to come first
    "expert": ("expert", "tensor"),
    "width": ("fsdp", "sequence", "expert"),  # columns of the embedding
    "vocab": ("tensor", "expert", "sequence", "fsdp"),  # columns of the head
}


@dataclass(frozen=True)
class MeshRules:
    """How parameters and tokens are sharded over a mesh."""

    rules: Mapping[str, Names]
    rows: Names  # mesh axes that shard the rows of a batch
    time: Names  # mesh axes that shard their tokens


TRAINING = MeshRules(RULES, ("data", "fsdp", "expert"), ("sequence",))
# A decode step has few tokens and reads all weights. So only the embedding, the head and the
# experts, to which tokens travel, are sharded over devices with different rows.
SAMPLING = MeshRules(
    {
        "heads": ("tensor",),
        "kv": ("tensor",),
        "expert": ("fsdp", "expert", "sequence", "tensor"),
        "width": RULES["width"],
        "vocab": RULES["vocab"],
    },
    ("data", "fsdp", "expert", "sequence"),
    (),
)


# The same with every expert on every device: the sum over sharded experts would run over devices,
# in an order that is not batch-invariant.
INVARIANT = MeshRules(
    {axis: names for axis, names in SAMPLING.rules.items() if axis != "expert"}, SAMPLING.rows, ()
)


def sampling_rules(cfg: ModelConfig) -> MeshRules:
    """Return the rules for the engine's copy of the weights and its tokens."""
    return INVARIANT if cfg.numerics == "invariant" else SAMPLING


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Return the mesh of a run, over all devices unless some are given; None for one device."""
    if cfg.devices == 1:
        return None
    shape = tuple(getattr(cfg, name) for name in AXES)
    # jax.make_mesh makes explicit axes by default, with which many ops outside a shard_map would
    # have to state how their results are sharded.
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices)


def make_one_device_mesh(device: Any = None) -> Mesh:
    """Return a mesh of one device, all of whose axes have size 1."""
    device = jax.local_devices()[0] if device is None else device
    return Mesh(np.array([device]).reshape((1,) * len(AXES)), AXES)


def state_mesh(mesh: Mesh | None, cfg: OptimConfig) -> Mesh | None:
    """Return the mesh of a run's state.

    With arrays in host memory, every array must name its memory kind, on one device through a mesh
    of that device: an array without one would make jax compile twice.
    """
    return make_one_device_mesh() if mesh is None and cfg.uses_host_memory else mesh


def drop_unit_axes(mesh: Mesh) -> Mesh:
    """Return the mesh of the same devices without axes of size 1."""
    used = tuple(name for name, size in mesh.shape.items() if size > 1)
    return Mesh(mesh.devices.reshape([mesh.shape[name] for name in used]), used)


def partition_axes(
    axes: Sequence[str | None],
    shape: Sequence[int],
    sizes: Mapping[str, int],
    rules: Mapping[str, Names] = RULES,
) -> tuple[Names, ...]:
    """Return the mesh axes that shard each dimension of a parameter; none is used twice."""
    vector = len([axis for axis in axes if axis != STACK]) < 2
    used: set[str] = set()
    cuts = []
    for axis, dim in zip(axes, shape, strict=True):
        names: Names = ()
        for name in rules.get(axis or "", ()):
            size = math.prod(sizes[n] for n in names) * sizes[name]
            if sizes[name] == 1 or name in used or dim % size or (vector and name != "tensor"):
                continue
            names += (name,)
        # A PartitionSpec may name each axis of the mesh once.
        used |= set(names)
        cuts.append(names)
    return tuple(cuts)


def local_shape(
    shape: Sequence[int],
    axes: Sequence[str | None],
    sizes: Mapping[str, int],
    rules: Mapping[str, Names] = RULES,
) -> tuple[int, ...]:
    """Return the shape of one device's shard of a parameter."""
    names = partition_axes(axes, shape, sizes, rules)
    return tuple(
        dim // math.prod(sizes[name] for name in cut) for dim, cut in zip(shape, names, strict=True)
    )


def count_shards(mesh: Mesh | None, names: Names) -> int:
    """Return the number of shards that these axes make."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in names)


def mesh_spec(*names: Names) -> P:
    """Return the PartitionSpec with these mesh axes for each dimension."""
    return P(*(cut or None for cut in names))


def check_batch_shape(shape: tuple[int, ...], mesh: Mesh, placement: MeshRules) -> None:
    """Raise ValueError unless devices have equal parts of the rows and tokens of [B, T]."""
    parts = (
        ("rows", placement.rows, "rows of a batch"),
        ("length", placement.time, "tokens of a row"),
    )
    for (field, names, text), size in zip(parts, shape, strict=True):
        if size % (shards := count_shards(mesh, names)):
            padded = -(-size // shards) * shards
            axes = " * ".join(name for name in names if mesh.shape[name] > 1)
            raise ValueError(
                f"the {text} ({size}) must be a multiple of the {shards} devices of {axes}. Try "
                f"{padded}, which for shared prompts is PromptSharing({field}={padded})."
            )


def map_shards(fn: Callable[..., Any], mesh: Mesh, ins: Any, outs: Any) -> Callable[..., Any]:
    """Return fn in a shard_map over the axes of size above 1. XLA for CPU would not remove sums
    over axes of size 1."""
    mesh = drop_unit_axes(mesh)

    def drop_uncut(spec: P) -> P:
        names_by_dim = ((cut,) if isinstance(cut, str) else cut or () for cut in spec)
        return mesh_spec(*(tuple(n for n in names if n in mesh.shape) for names in names_by_dim))

    ins, outs = jax.tree.map(drop_uncut, (ins, outs), is_leaf=lambda x: isinstance(x, P))
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def param_shardings(cfg: ModelConfig, mesh: Mesh, placement: MeshRules = TRAINING) -> Params:
    """Return the tree of NamedSharding of a model's parameters."""

    def param_sharding(spec: Any) -> NamedSharding:
        cut = partition_axes(spec.axes, spec.shape, mesh.shape, placement.rules)
        return NamedSharding(mesh, mesh_spec(*cut))

    return map_specs(param_sharding, cfg)


def state_shardings(state: Leaf, cfg: ModelConfig, mesh: Mesh, moments: str = "device") -> Leaf:
    """Return the shardings of a TrainState, or of its shapes.

    Leaves that mirror parameters (moments, reference, a critic's backbone) are sharded as those
    are; all others are replicated. Moments are on the devices or, with "host", in their hosts'
    memory.
    """
    by_path = {
        tuple(map(str, path)): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(param_shardings(cfg, mesh))
    }
    # The longest matching path is the most specific one.
    lengths = sorted({len(path) for path in by_path}, reverse=True)
    replicated = NamedSharding(mesh, P())

    def leaf_sharding(path: Any, leaf: Any) -> NamedSharding:
        names = tuple(map(str, path))
        sharding = find_param_sharding(names, leaf)
        return (
            move_to_host_memory(sharding)
            if moments == "host" and names[0] == ".opt_state" and leaf.ndim
            else sharding
        )

    def find_param_sharding(names: tuple[str, ...], leaf: Any) -> NamedSharding:
        for length in lengths:
            if (sharding := by_path.get(names[-length:])) is not None and leaf.ndim == len(
                sharding.spec
            ):
                return sharding
        return replicated

    return jax.tree_util.tree_map_with_path(leaf_sharding, state)


def move_to_host_memory(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in the memory of the devices' hosts."""
    host_sharding = sharding.with_memory_kind("pinned_host")
    if host_sharding.memory_kind == "pinned_host":
        return host_sharding
    # The compiler for an absent GPU has no memory kinds; a mesh without devices keeps the one
    # given.
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and mesh.size > 1:
        mesh = drop_unit_axes(mesh)
    return NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")


def sharded_shapes(
    state: Leaf, cfg: ModelConfig, mesh: Mesh | None, moments: str = "device"
) -> Leaf:
    """Return the shapes of a TrainState with their shardings; unchanged without a mesh."""
    if mesh is None:
        return state
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        state_shardings(state, cfg, mesh, moments),
    )


def batch_sharding(mesh: Mesh, ndim: int, placement: MeshRules = TRAINING) -> NamedSharding:
    """Return the sharding of an array of a batch, [B], [B, T] or [B, T, …]."""
    cut = (placement.rows, placement.time)[:ndim]
    return NamedSharding(mesh, mesh_spec(*cut))


def shard_batch(tree: Leaf, mesh: Mesh | None, placement: MeshRules = TRAINING) -> Leaf:
    """Put the arrays of a batch on their devices; unchanged without a mesh."""
    if mesh is None:
        return tree
    return _put_arrays(tree, lambda x: batch_sharding(mesh, np.ndim(x), placement))


def replicate_arrays(tree: Leaf, mesh: Mesh | None) -> Leaf:
    """Put a copy of each array on every device; unchanged without a mesh."""
    if mesh is None:
        return tree
    return _put_arrays(tree, lambda _: NamedSharding(mesh, P()))


def _put_arrays(tree: Leaf, sharding_fn: Callable[[Any], NamedSharding]) -> Leaf:
    def put_array(x: Any) -> jax.Array:
        sharding = sharding_fn(x)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        # device_put would first compare the array between the processes. Each of them has all of it
        # and fills its own shards.
        full = np.asarray(x)
        return jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])

    return jax.tree.map(put_array, tree)
