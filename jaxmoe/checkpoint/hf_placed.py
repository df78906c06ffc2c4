# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint onto a mesh: one tensor at a time is whole in a host's memory.

Every process reads the files and keeps what its devices hold. Next: jaxmoe/checkpoint/run.py.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxmoe.checkpoint.entries import Entry, leaf_of
from jaxmoe.checkpoint.hf import Progress, read_entries
from jaxmoe.config import ModelConfig
from jaxmoe.model.params import abstract_params
from jaxmoe.parallel.sharding import param_shardings
from jaxmoe.shapes import Params


def load_placed(
    directory: str | Path, cfg: ModelConfig, dtype: str, mesh: Mesh, *,
    progress: Progress | None = None,
) -> Params:  # fmt: skip
    """As `load_params`, but each device holds its own part of every parameter.

    Memory: of the host one tensor of the checkpoint; of a device its parts, and once more the
    largest of them. Raises as `load_params` does.
    """
    shardings = param_shardings(cfg, mesh)
    parts: dict[tuple[str, ...], dict[Any, list[jax.Array]]] = {}

    def fresh(entry: Entry) -> np.ndarray:
        return np.zeros(entry.held, jnp.dtype(dtype))

    for entry, tensor in read_entries(Path(directory), cfg, fresh, progress=progress):
        sharding, stacked = leaf_of(shardings, entry), entry.pair is not None
        tensor = tensor[None] if stacked else tensor  # no axis of the mesh cuts pairs
        of_devices = parts.setdefault(entry.keys, {})
        for device, index in sharding.addressable_devices_indices_map(tensor.shape).items():
            part = tensor[index][0] if stacked else tensor[index]
            of_devices.setdefault(device, []).append(jax.device_put(part, device))
        jax.block_until_ready(list(of_devices.values()))

    def joined(path: Any, whole: Any, sharding: NamedSharding) -> jax.Array:
        of_devices = parts.pop(tuple(str(step.key) for step in path))
        stacked = path[0].key == "layers"
        arrays = [jnp.stack(x) if stacked else x[0] for x in of_devices.values()]
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, arrays)

    return jax.tree_util.tree_map_with_path(joined, abstract_params(cfg), shardings)
