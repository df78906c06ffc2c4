# SPDX-License-Identifier: Apache-2.0
"""Who holds what: the one table from logical axes of parameters to axes of the mesh.

The mesh has five axes, of size 1 where they are not used:

    data      whole copies of the model, side by side
    fsdp      weights, gradients and moments are cut; whole again one layer at a time
    expert    experts are cut, and tokens travel to them; other weights as by fsdp
    sequence  the tokens of a row are cut; weights as by fsdp
    tensor    heads are cut, and experts once more

Rows go over data, fsdp and expert. An axis of a parameter takes the mesh axes that RULES names, in
their order, as long as they divide it. Vectors are held whole, but for heads: to gather them costs
more than to hold them.
Next: jaxmoe/parallel/ops.py computes with what is so cut.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MeshConfig, ModelConfig, OptimConfig
from jaxmoe.model.params import map_specs
from jaxmoe.shapes import Leaf, Params

AXES = ("data", "fsdp", "expert", "sequence", "tensor")
Names = tuple[str, ...]  # of mesh axes that cut one dimension, major first

RULES: Mapping[str, Names] = {
    "embed": ("fsdp", "sequence"),
    "heads": ("tensor", "expert"),
    "kv": ("tensor", "expert"),
    "expert": ("expert", "tensor"),  # what cuts tokens first: expert.py counts on it
    "width": ("fsdp", "sequence", "expert"),  # of the embedding
    "vocab": ("tensor", "expert", "sequence", "fsdp"),  # of the head
}


@dataclass(frozen=True)
class MeshRules:
    """How parameters and tokens lie on a mesh."""

    rules: Mapping[str, Names]
    rows: Names  # what cuts the rows of a batch
    time: Names  # and their tokens


TRAINING = MeshRules(RULES, ("data", "fsdp", "expert"), ("sequence",))
# a decode step has few tokens and reads all weights: none but the embedding's, the head's and the
# experts', to which tokens travel, is cut over devices that have rows of their own
SAMPLING = MeshRules(
    {"heads": ("tensor",), "kv": ("tensor",), "expert": ("fsdp", "expert", "sequence", "tensor"),
     "width": RULES["width"], "vocab": RULES["vocab"]},
    ("data", "fsdp", "expert", "sequence"), (),
)  # fmt: skip


# the same with every expert on every device: cut, their sum would go over devices, in an order of
# its own
INVARIANT = MeshRules(
    {axis: names for axis, names in SAMPLING.rules.items() if axis != "expert"}, SAMPLING.rows, ()
)


def sampling_rules(cfg: ModelConfig) -> MeshRules:
    """How the engine's copy of the weights and its tokens lie on a mesh."""
    return INVARIANT if cfg.numerics == "invariant" else SAMPLING


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The mesh of a run, over all devices unless some are given; None for one device."""
    if cfg.devices == 1:
        return None
    shape = tuple(getattr(cfg, name) for name in AXES)
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices)


def one_device(device: Any = None) -> Mesh:
    """The mesh of one device, on which all axes are of size 1."""
    device = jax.local_devices()[0] if device is None else device
    return Mesh(np.array([device]).reshape((1,) * len(AXES)), AXES)


def state_mesh(mesh: Mesh | None, cfg: OptimConfig) -> Mesh | None:
    """Where a run's state lies. Where hosts hold something every array says which memory it is in,
    on one device by a mesh of that: what says nothing is compiled for twice."""
    return one_device() if mesh is None and cfg.uses_host_memory else mesh


def only_cutting(mesh: Mesh) -> Mesh:
    """The same devices without axes of size 1."""
    used = tuple(name for name, size in mesh.shape.items() if size > 1)
    return Mesh(mesh.devices.reshape([mesh.shape[name] for name in used]), used)


def partition(
    axes: Sequence[str | None],
    shape: Sequence[int],
    sizes: Mapping[str, int],
    rules: Mapping[str, Names] = RULES,
) -> tuple[Names, ...]:
    """Of each dimension of a parameter the mesh axes that cut it; none is used twice."""
    vector = len([axis for axis in axes if axis != "pair"]) < 2
    taken: set[str] = set()
    cut = []
    for axis, dim in zip(axes, shape, strict=True):
        names: Names = ()
        for name in rules.get(axis or "", ()):
            size = math.prod(sizes[n] for n in names) * sizes[name]
            if sizes[name] == 1 or name in taken or dim % size or (vector and name != "tensor"):
                continue
            names += (name,)
        taken |= set(names)
        cut.append(names)
    return tuple(cut)


def local_shape(
    shape: Sequence[int],
    axes: Sequence[str | None],
    sizes: Mapping[str, int],
    rules: Mapping[str, Names] = RULES,
) -> tuple[int, ...]:
    """What one device holds of a parameter."""
    names = partition(axes, shape, sizes, rules)
    return tuple(
        dim // math.prod(sizes[name] for name in cut) for dim, cut in zip(shape, names, strict=True)
    )


def shards_of(mesh: Mesh | None, names: Names) -> int:
    """Parts that these axes cut a dimension into."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in names)


def spec_of(*names: Names) -> P:
    """A PartitionSpec of the mesh axes of each dimension."""
    return P(*(cut or None for cut in names))


def param_shardings(cfg: ModelConfig, mesh: Mesh, placement: MeshRules = TRAINING) -> Params:
    """The tree of NamedSharding of a model's parameters."""

    def sharding(spec: Any) -> NamedSharding:
        cut = partition(spec.axes, spec.shape, mesh.shape, placement.rules)
        return NamedSharding(mesh, spec_of(*cut))

    return map_specs(sharding, cfg)


def state_shardings(state: Leaf, cfg: ModelConfig, mesh: Mesh, moments: str = "device") -> Leaf:
    """Shardings of a TrainState, or of its shapes: whatever mirrors the parameters lies as they
    do (moments, reference, a critic's backbone), the rest is on every device.

    Moments lie on the devices or, by "host", in the memory of their hosts.
    """
    by_path = {
        tuple(map(str, path)): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(param_shardings(cfg, mesh))
    }
    lengths = sorted({len(path) for path in by_path}, reverse=True)
    whole = NamedSharding(mesh, P())

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = tuple(map(str, path))
        at = lies(names, leaf)
        return on_host(at) if moments == "host" and names[0] == ".opt_state" and leaf.ndim else at

    def lies(names: tuple[str, ...], leaf: Any) -> NamedSharding:
        for length in lengths:
            if (found := by_path.get(names[-length:])) is not None and leaf.ndim == len(found.spec):
                return found
        return whole

    return jax.tree_util.tree_map_with_path(of, state)


def on_host(at: NamedSharding) -> NamedSharding:
    """The same pieces in the memory of their devices' hosts."""
    there = at.with_memory_kind("pinned_host")
    if there.memory_kind == "pinned_host":
        return there
    # compilers of GPUs that are not here know of no memories: those of a mesh without devices stay
    mesh = at.mesh
    if isinstance(mesh, Mesh) and mesh.size > 1:
        mesh = only_cutting(mesh)
    return NamedSharding(mesh.abstract_mesh, at.spec, memory_kind="pinned_host")


def placed_shapes(
    state: Leaf, cfg: ModelConfig, mesh: Mesh | None, moments: str = "device"
) -> Leaf:
    """Shapes of a TrainState that say where each array lies; as they are without a mesh."""
    if mesh is None:
        return state
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        state, state_shardings(state, cfg, mesh, moments),
    )  # fmt: skip


def place_state(state: Leaf, cfg: ModelConfig, mesh: Mesh | None) -> Leaf:
    """A TrainState on its devices; as it is without a mesh."""
    if mesh is None:
        return state
    return jax.device_put(state, state_shardings(state, cfg, mesh))


def batch_sharding(mesh: Mesh, ndim: int, placement: MeshRules = TRAINING) -> NamedSharding:
    """Of an array of a batch, [B], [B, T] or [B, T, …]."""
    cut = (placement.rows, placement.time)[:ndim]
    return NamedSharding(mesh, spec_of(*cut))


def place(tree: Leaf, mesh: Mesh | None, placement: MeshRules = TRAINING) -> Leaf:
    """The arrays of a batch on their devices; as they are without a mesh."""
    if mesh is None:
        return tree

    def put(x: Any) -> jax.Array:
        at = batch_sharding(mesh, np.ndim(x), placement)
        if jax.process_count() == 1:
            return jax.device_put(x, at)
        whole = np.asarray(x)  # which every process has
        return jax.make_array_from_callback(whole.shape, at, lambda index: whole[index])

    return jax.tree.map(put, tree)
