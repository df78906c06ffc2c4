# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints in and out: safetensors, sharded or not, bf16, f16, f32 or MXFP4.

`entries(cfg)` lays the table of parameters out as checkpoint tensors; import, export and every
check walk that one list. All names and shapes are checked from the files' headers before any
data is read, and data is read in pieces straight into the stacked arrays, so that a load needs
little more memory than its result.
Next: jaxmoe/checkpoint/mxfp4.py decodes the experts' four bits, tensor_files.py the files.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.layouts import checkpoint_tensor, gather
from jaxmoe.checkpoint.tensor_files import (
    DTYPES,
    FLOATS,
    INDEX,
    SINGLE,
    Planned,
    Stored,
    find_tensors,
    mistyped,
    not_finite,
    plan_shards,
    planned_bytes,
    read_rows,
    write_shard,
)
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.config.file_sums import write_file_sums
from jaxmoe.model.config import to_hf
from jaxmoe.model.params import Layout, Spec, param_specs
from jaxmoe.shapes import Params

Progress = Callable[[int, int, str], None]  # bytes read, bytes in all, the tensor at hand

_FILE_DTYPES = {"bfloat16": "BF16", "float32": "F32", "mxfp4": "BF16"}  # outside the experts
_QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_PIECE_BYTES = 8 * 2**20  # read at once, or one expert where that is more


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
    def packable(self) -> bool:
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
    if dtype == "mxfp4" and entry.packable:
        experts, summed, out = entry.shape
        scales = (experts, out, summed // mxfp4.GROUP)
        blocks = (*scales, mxfp4.GROUP // 2)
        return [(entry.name + "_blocks", "U8", blocks), (entry.name + "_scales", "U8", scales)]
    return [(entry.name, _FILE_DTYPES[dtype], entry.shape)]


def planned_tensors(cfg: ModelConfig, dtype: str) -> list[Planned]:
    """(name, the format's dtype, shape) of everything `iter_hf` yields, in its order."""
    return [item for entry in entries(cfg) for item in stored(entry, dtype)]


def load_params(
    directory: str | Path,
    cfg: ModelConfig,
    dtype: str | None = None,
    *,
    progress: Progress | None = None,
) -> Params:
    """The weights of a checkpoint folder as numpy arrays in our layout; padding rows are 0.

    Args:
        dtype: None is the config's.
    Numerics: MXFP4 decodes exactly; a narrower `dtype` than the file's rounds to nearest, even.
    Raises ConfigError, from headers alone, for a missing, unknown, misshapen or mistyped tensor,
    a missing shard or a truncated file; from the data for NaN, infinity, or bits that are not
    those we wrote. The files of others hold no digests: there only NaN and infinity are seen.
    """
    params = jax.tree.map(
        lambda spec: np.zeros(spec.shape, jax.numpy.dtype(dtype or cfg.dtype)),
        param_specs(cfg),
        is_leaf=lambda leaf: isinstance(leaf, Spec),
    )

    def here(entry: Entry) -> np.ndarray:
        leaf = leaf_of(params, entry)
        return leaf if entry.pair is None else leaf[entry.pair]

    for _ in read_entries(Path(directory), cfg, here, progress=progress):
        pass
    return params


def read_entries(
    directory: Path,
    cfg: ModelConfig,
    into: Callable[[Entry], np.ndarray],
    *,
    progress: Progress | None = None,
) -> Iterator[tuple[Entry, np.ndarray]]:
    """The tensors of a checkpoint one after the other, each read into zeros that `into` gives.

    Raises as `load_params` does.
    """
    tensors = find_tensors(directory)
    table = entries(cfg)
    _check(directory, table, tensors)
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    for entry in table:
        leaf, broken = into(entry), 0
        for start, piece, nbytes in _pieces(entry, tensors):
            with np.errstate(over="ignore"):  # it becomes infinite, and is counted
                piece = piece.astype(leaf.dtype, copy=False)
            broken += not_finite(piece)
            _place(leaf, piece, start, entry.layout)
            done += nbytes
            if progress is not None:
                progress(done, total, entry.name)
        if broken:
            raise ConfigError(
                f"{directory}: {entry.name} must be finite in {leaf.dtype}, got {broken} NaN or "
                "infinite values. Fetch it again, or load another checkpoint."
            )
        yield entry, leaf


def leaf_of(params: Params, entry: Entry) -> Any:
    """The leaf that an entry is, or that it is one layer pair of."""
    node: Any = params
    for key in entry.keys:
        node = node[key]
    return node


def _place(ours: np.ndarray, piece: np.ndarray, start: int, layout: Layout) -> None:
    """Write rows start… of a checkpoint tensor to where they belong in ours."""
    stop = start + len(piece)
    if layout in ("transpose", "transpose_pad"):
        ours[:, start:stop] = piece.T
    elif layout in ("gate_up", "gate_up_bias"):
        half = ours.shape[-1] // 2
        ours[start:stop, ..., :half] = piece[..., 0::2]
        ours[start:stop, ..., half:] = piece[..., 1::2]
    else:
        ours[start:stop] = piece


def _pieces(entry: Entry, tensors: dict[str, Stored]) -> Iterator[tuple[int, np.ndarray, int]]:
    """(first row, rows, bytes read) of a tensor, dense and in the checkpoint's layout."""
    if entry.name in tensors:
        tensor = tensors[entry.name]
        rows = max(1, _PIECE_BYTES * tensor.shape[0] // tensor.nbytes)
        for start, piece in read_rows(tensor, rows):
            yield start, piece, piece.nbytes
        return
    blocks, scales = (read_rows(tensors[entry.name + end], 1) for end in ("_blocks", "_scales"))
    for (start, block), (_, scale) in zip(blocks, scales, strict=True):
        if scale.max() == 255:
            raise ConfigError(
                f"{tensors[entry.name + '_scales'].path}: {entry.name}_scales must be at most 254, "
                f"got 255 (NaN) in {np.count_nonzero(scale == 255)} groups. Fetch it again."
            )
        dense = mxfp4.decode(block, scale).swapaxes(1, 2)
        yield start, dense, block.nbytes + scale.nbytes


def _check(directory: Path, table: list[Entry], tensors: dict[str, Stored]) -> None:
    problems = list(_problems(table, tensors))
    if problems:
        more = f" ({len(problems) - 1} more like it.)" if len(problems) > 1 else ""
        raise ConfigError(
            f"{directory}: {problems[0]}{more} Compare config.json with the *.safetensors."
        )


def _problems(table: list[Entry], tensors: dict[str, Stored]) -> Iterator[str]:
    expected = set[str]()
    for entry in table:
        packed = entry.packable and entry.name not in tensors
        packed = packed and any(entry.name + end in tensors for end in ("_blocks", "_scales"))
        if packed and entry.shape[1] % mxfp4.GROUP:
            yield f"{entry.name} has {entry.shape[1]} rows; MXFP4 needs a multiple of 32."
        for name, _, shape in stored(entry, "mxfp4" if packed else "bfloat16"):
            expected.add(name)
            if name not in tensors:
                yield f"{name} is missing; it must have shape {shape}."
                continue
            got, kinds = tensors[name], ("U8",) if packed else FLOATS
            if got.shape != shape:
                yield f"{name} must have shape {shape}, got {got.shape}."
            elif got.dtype not in kinds:
                yield mistyped(got.path, name, got.dtype, kinds)
    for name in sorted(set(tensors) - expected):
        yield f"{name} is no tensor of this model."


def iter_hf(
    params: Params, cfg: ModelConfig, dtype: str = "bfloat16"
) -> Iterator[tuple[str, np.ndarray]]:
    """The export stream: (checkpoint name, array), one tensor in memory at a time.

    Raises ValueError where a leaf is not the table's or does not fit MXFP4; ConfigError
    for another dtype than bfloat16, float32 or mxfp4 (experts packed, the rest bfloat16).
    """
    check_params(params, cfg)
    for entry in entries(cfg):
        ours, items = gather_entry(params, entry), stored(entry, dtype)
        if broken := not_finite(ours):
            raise ConfigError(f"{entry.name} must be finite, got {broken} NaN or infinite values.")
        if len(items) == 1:
            yield entry.name, _to_checkpoint(ours, entry, DTYPES[items[0][1]])
        else:
            yield from zip([name for name, _, _ in items], _pack(ours, entry), strict=True)


def check_params(params: Params, cfg: ModelConfig) -> None:
    """Raises ValueError where a leaf is missing, unknown or of another shape than the table's."""

    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        flat, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Spec))
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in flat}

    got, want = shapes(params), shapes(param_specs(cfg))
    for name in sorted(got.keys() | want.keys()):
        if got.get(name) != want.get(name):
            raise ValueError(
                f"params {name} must have shape {want.get(name, 'none (unknown)')}, got "
                f"{got.get(name, 'none (missing)')}. Are these the weights of this model config?"
            )


def gather_entry(params: Params, entry: Entry, *, here: bool = True) -> np.ndarray:
    """An entry's array in our layout on the host, as `gather` does it."""
    return gather(leaf_of(params, entry), entry.pair, here=here)


def _to_checkpoint(ours: np.ndarray, entry: Entry, dtype: np.dtype) -> np.ndarray:
    """The inverse of `_place`, padding cut off."""
    return checkpoint_tensor(ours, entry.layout, entry.shape, dtype)


def _pack(ours: np.ndarray, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 blocks and scales, made one expert at a time."""
    blocks, scales = (np.empty(shape, np.uint8) for _, _, shape in stored(entry, "mxfp4"))
    alone = replace(entry, shape=(1, *entry.shape[1:]))
    for e in range(len(ours)):
        dense = _to_checkpoint(ours[e : e + 1], alone, DTYPES["F32"])
        blocks[e : e + 1], scales[e : e + 1] = mxfp4.encode(dense.swapaxes(1, 2))
    return blocks, scales


def save_params(
    params: Params,
    cfg: ModelConfig,
    directory: str | Path,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
    beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write config.json and *.safetensors that `transformers` and vLLM read.

    Everything, and what `beside` adds to the folder it is given, is written to DIRECTORY.partial
    and renamed at the end, so that DIRECTORY is whole or absent; the safetensors hold a digest of
    every tensor, jaxmoe.sha256 sums of the other files. Numerics: float32 to bfloat16 rounds to
    nearest, even; MXFP4 as `mxfp4.encode`.
    Raises ConfigError where the directory already holds something, the disk is full, a weight is
    not finite, or MXFP4 does not fit.
    """
    directory = Path(directory)
    planned = check_export(cfg, directory, dtype)
    partial = directory.with_name(directory.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        needed = sum(map(planned_bytes, planned))
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")
        _write(params, cfg, partial, dtype, plan_shards(planned, max_shard_bytes))
        beside(partial)
        write_file_sums(partial)
        partial.replace(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} must be a folder that can be made and filled; {error}. Nothing is left "
            "of it. Free some space, or name another one."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_export(cfg: ModelConfig, directory: Path, dtype: str) -> list[Planned]:
    """What an export would write. Raises ConfigError where it cannot."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} must be new or empty for an export. Name another one.")
    if dtype == "mxfp4" and (cfg.d_model % mxfp4.GROUP or cfg.d_expert % mxfp4.GROUP):
        raise ConfigError(
            f"MXFP4 needs model.d_model ({cfg.d_model}) and model.d_expert ({cfg.d_expert}) to be "
            "multiples of 32. Try --set save.export_dtype=bfloat16."
        )
    return planned_tensors(cfg, dtype)


def _write(
    params: Params, cfg: ModelConfig, folder: Path, dtype: str, shards: list[list[Planned]]
) -> None:
    stream, where, total = iter_hf(params, cfg, dtype), dict[str, str](), 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = SINGLE if len(shards) == 1 else name
        total += write_shard(folder / name, shard, stream)
        where |= dict.fromkeys((tensor for tensor, _, _ in shard), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    config = to_hf(cfg, dtype="bfloat16" if dtype == "mxfp4" else dtype)
    packed = {"quantization_config": _QUANTIZATION} if dtype == "mxfp4" else {}
    (folder / "config.json").write_text(json.dumps(config | packed, indent=2))
