# SPDX-License-Identifier: Apache-2.0
"""Load a Hugging Face checkpoint onto a mesh, with one full tensor at a time in host memory.

Every process reads the files and keeps its devices' shards. Next: jaxmoe/checkpoint/run.py.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxmoe.checkpoint.entries import Entry, leaf_of
from jaxmoe.checkpoint.hf import read_entries
from jaxmoe.config import ModelConfig
from jaxmoe.model.params import abstract_params, param_specs, read_dtype
from jaxmoe.parallel.sharding import param_shardings
from jaxmoe.shapes import Params


def load_sharded_params(directory: str | Path, cfg: ModelConfig, dtype: str, mesh: Mesh) -> Params:
    """Load parameters as `load_params`, sharded over a mesh; `dtype` may be "as_read".

    Memory: on the host, one tensor of the checkpoint; on a device, its shards and a second copy of
    the largest shard. Raises: ConfigError as `load_params` does.
    """
    shardings, specs = param_shardings(cfg, mesh), param_specs(cfg)
    parts: dict[tuple[str, ...], dict[Any, list[jax.Array]]] = {}

    def init_leaf(entry: Entry) -> np.ndarray:
        read = read_dtype(leaf_of(specs, entry), cfg, "float32") if dtype == "as_read" else dtype
        return np.zeros(entry.param_shape, jnp.dtype(read))

    for entry, tensor in read_entries(Path(directory), cfg, init_leaf):
        sharding, stacked = leaf_of(shardings, entry), entry.index is not None
        tensor = tensor[None] if stacked else tensor  # no mesh axis shards the axis of layers
        shards_by_device = parts.setdefault(entry.keys, {})
        for device, index in sharding.addressable_devices_indices_map(tensor.shape).items():
            part = tensor[index][0] if stacked else tensor[index]
            shards_by_device.setdefault(device, []).append(jax.device_put(part, device))
        # device_put is asynchronous. Without the wait, several tensors would be in host memory at
        # once.
        jax.block_until_ready(list(shards_by_device.values()))

    def join_shards(path: Any, abstract: Any, sharding: NamedSharding) -> jax.Array:
        # Removed from the dict, so that the parts are freed as soon as they are stacked.
        shards_by_device = parts.pop(tuple(str(step.key) for step in path))
        stacked = path[0].key == "layers"
        arrays = [jnp.stack(x) if stacked else x[0] for x in shards_by_device.values()]
        return jax.make_array_from_single_device_arrays(abstract.shape, sharding, arrays)

    return jax.tree_util.tree_map_with_path(join_shards, abstract_params(cfg), shardings)
