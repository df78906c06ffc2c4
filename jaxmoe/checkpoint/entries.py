# SPDX-License-Identifier: Apache-2.0
"""The table of parameters as a checkpoint's tensors: import, export and every check walk one list.

Next: jaxmoe/checkpoint/hf.py reads and writes them.
"""

from dataclasses import dataclass
from typing import Any

import jax

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.tensor_files import Planned
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.params import Layout, Spec, param_specs
from jaxmoe.shapes import Params

_FILE_DTYPES = {"bfloat16": "BF16", "float32": "F32", "mxfp4": "BF16"}  # outside the experts


@dataclass(frozen=True)
class Entry:
    """One checkpoint tensor of the table: its name and shape there, its place here."""

    name: str
    shape: tuple[int, ...]
    held: tuple[int, ...]  # shape here, layer pairs aside
    keys: tuple[str, ...]  # path to the leaf in params
    pair: int | None  # index into the leaf, where it is stacked over layer pairs
    layout: Layout
    read: str  # Spec.read

    @property
    def is_packable(self) -> bool:
        return len(self.shape) == 3  # the experts' two matrices, [E, in, out]


def entries(cfg: ModelConfig) -> list[Entry]:
    """The tensors of a checkpoint, from the embedding through the layers to the head."""
    flat, _ = jax.tree.flatten_with_path(
        param_specs(cfg), is_leaf=lambda leaf: isinstance(leaf, Spec)
    )
    found: list[tuple[int, Entry]] = []
    for path, spec in flat:
        keys = tuple(str(step.key) for step in path)
        stacked = spec.axes[0] == "pair"
        held = spec.shape[1:] if stacked else spec.shape
        shape = held[::-1] if spec.layout in ("transpose", "transpose_pad") else held
        if spec.layout in ("pad_rows", "transpose_pad"):
            shape = (cfg.vocab_size, *shape[1:])
        if not stacked:
            order = -1 if keys == ("embed",) else cfg.n_layers
            found.append((order, Entry(spec.hf, shape, held, keys, None, spec.layout, spec.read)))
            continue
        for pair in range(spec.shape[0]):
            layer = 2 * pair + ("sliding", "full").index(keys[1])
            name = spec.hf.format(layer)
            found.append((layer, Entry(name, shape, held, keys, pair, spec.layout, spec.read)))
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def stored(entry: Entry, dtype: str) -> list[Planned]:
    """What holds an entry in a file: the one tensor, or the packed two."""
    if dtype not in _FILE_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_FILE_DTYPES)}, got {dtype!r}.")
    if dtype == "mxfp4" and entry.is_packable:
        experts, summed, out = entry.shape
        scales = (experts, out, summed // mxfp4.GROUP)
        blocks = (*scales, mxfp4.GROUP // 2)
        return [(entry.name + "_blocks", "U8", blocks), (entry.name + "_scales", "U8", scales)]
    return [(entry.name, _FILE_DTYPES[dtype], entry.shape)]


def planned_tensors(cfg: ModelConfig, dtype: str) -> list[Planned]:
    """(name, the format's dtype, shape) of everything `iter_hf` yields, in its order."""
    return [item for entry in entries(cfg) for item in stored(entry, dtype)]


def leaf_of(params: Params, entry: Entry) -> Any:
    """The leaf that an entry is, or that it is one layer pair of."""
    node: Any = params
    for key in entry.keys:
        node = node[key]
    return node
