# SPDX-License-Identifier: Apache-2.0
"""The table of parameters as a list of a checkpoint's tensors, for import, export and checks.

Next: jaxmoe/checkpoint/hf.py reads and writes them.
"""

from dataclasses import dataclass
from typing import Any

import jax

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.tensor_files import PlannedTensor
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.params import Layout, Spec, param_specs
from jaxmoe.shapes import Params

_FILE_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, and the leaf of our parameters that holds it."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    param_shape: tuple[int, ...]  # in our layout, without the axis of layers
    keys: tuple[str, ...]  # path to the leaf in params
    index: int | None  # of the layer, in a leaf that is stacked over layers; None if it is not
    layout: Layout
    read: str  # Spec.read

    @property
    def is_packable(self) -> bool:
        return len(self.shape) == 3  # the experts' two matrices, [E, in, out]


def list_entries(cfg: ModelConfig) -> list[Entry]:
    """The tensors of a checkpoint, from the embedding through the layers to the head."""
    flat, _ = jax.tree.flatten_with_path(
        param_specs(cfg), is_leaf=lambda leaf: isinstance(leaf, Spec)
    )
    entries_by_layer: list[tuple[int, Entry]] = []
    for path, spec in flat:
        keys = tuple(str(step.key) for step in path)
        param_shape = spec.shape[1:] if spec.is_stacked else spec.shape
        shape = param_shape[::-1] if spec.layout in ("transpose", "transpose_pad") else param_shape
        if spec.layout in ("pad_rows", "transpose_pad"):
            shape = (cfg.vocab_size, *shape[1:])
        if not spec.is_stacked:
            order = -1 if keys == ("embed",) else cfg.n_layers
            entries_by_layer.append(
                (order, Entry(spec.hf, shape, param_shape, keys, None, spec.layout, spec.read))
            )
            continue
        for index in range(spec.shape[0]):
            layer = cfg.plan.groups[keys[1]].layer_number(index)
            name = spec.hf.format(layer)
            entries_by_layer.append(
                (layer, Entry(name, shape, param_shape, keys, index, spec.layout, spec.read))
            )
    return [entry for _, entry in sorted(entries_by_layer, key=lambda item: item[0])]


def plan_entry(entry: Entry, dtype: str, unpacked: str = "bfloat16") -> list[PlannedTensor]:
    """The tensors that store an entry in a file: one, or blocks and scales of packed experts.

    unpacked: for mxfp4, the dtype of all tensors that are not packed.
    """
    if dtype not in (*_FILE_DTYPES, "mxfp4"):
        raise ConfigError(f"dtype must be one of {', '.join(_FILE_DTYPES)}, mxfp4, got {dtype!r}.")
    if dtype == "mxfp4" and entry.is_packable:
        experts, summed, out = entry.shape
        scales = (experts, out, summed // mxfp4.GROUP)
        blocks = (*scales, mxfp4.GROUP // 2)
        return [(entry.name + "_blocks", "U8", blocks), (entry.name + "_scales", "U8", scales)]
    return [(entry.name, _FILE_DTYPES[unpacked if dtype == "mxfp4" else dtype], entry.shape)]


def planned_tensors(cfg: ModelConfig, dtype: str) -> list[PlannedTensor]:
    """(name, safetensors dtype, shape) of each tensor that `iter_hf` yields, in the same order."""
    return [item for entry in list_entries(cfg) for item in plan_entry(entry, dtype, cfg.dtype)]


def leaf_of(params: Params, entry: Entry) -> Any:
    """The leaf of params that contains an entry (all layers of its group)."""
    node: Any = params
    for key in entry.keys:
        node = node[key]
    return node
