# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints in and out: safetensors, sharded or not, bf16, f16, f32 or MXFP4.

`entries(cfg)` lays the table of parameters out as checkpoint tensors; import, export and every
check walk that one list. All names and shapes are checked from the files' headers before any
data is read, and data is read in pieces straight into the stacked arrays, so that a load needs
little more memory than its result. Experts in four bits are decoded, or stay as they are: then an
export gives their bytes back.
Next: jaxmoe/checkpoint/entries.py is that list, headers.py checks it; mxfp4.py, tensor_files.py.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.entries import Entry, entries, leaf_of, planned_tensors, stored
from jaxmoe.checkpoint.headers import check_headers, require_packable
from jaxmoe.checkpoint.layouts import checkpoint_tensor, gather, zeros_to_share
from jaxmoe.checkpoint.merge import merged_layer
from jaxmoe.checkpoint.tensor_files import (
    DTYPES,
    INDEX,
    SINGLE,
    Planned,
    Stored,
    find_tensors,
    not_finite,
    plan_shards,
    planned_bytes,
    read_rows,
    write_shard,
)
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.config.file_sums import write_file_sums
from jaxmoe.model.config import to_hf
from jaxmoe.model.lora import Adapted
from jaxmoe.model.params import Layout, Spec, param_shapes, param_specs, read_dtype
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

Progress = Callable[[int, int, str], None]  # bytes read, bytes in all, the tensor at hand

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


def load_params(
    directory: str | Path,
    cfg: ModelConfig,
    dtype: str | None = None,
    *,
    experts: Literal["dense", "packed"] = "dense",
    progress: Progress | None = None,
) -> Params:
    """The weights of a checkpoint folder as numpy arrays in our layout; padding rows are 0.

    On a CPU `jax.device_put` of them copies nothing; `jnp.asarray` does.
    Args:
        dtype: None is the config's; "as_read" what the forward reads each parameter in: matrices
            in the config's, the rest in float32.
        experts: "packed" keeps the four bits of the experts' matrices, as leaves `Mxfp4`; the
            checkpoint must hold them so (`packed.pack_experts` encodes others).
    Numerics: MXFP4 decodes exactly; a narrower `dtype` than the file's rounds to nearest, even.
    Raises ConfigError, from headers alone, for a missing, unknown, misshapen or mistyped tensor,
    a missing shard or a truncated file; from the data for NaN, infinity, or bits that are not
    those we wrote. The files of others hold no digests: there only NaN and infinity are seen.
    """
    if experts == "packed":
        require_packable(cfg)

    def fresh(spec: Spec) -> Leaf:
        if experts == "packed" and spec.is_packable:
            return mxfp4.room(spec.shape)
        held = read_dtype(spec, cfg, "float32") if dtype == "as_read" else dtype or cfg.dtype
        return zeros_to_share(spec.shape, jax.numpy.dtype(held))

    specs = param_specs(cfg)
    params = jax.tree.map(fresh, specs, is_leaf=lambda leaf: isinstance(leaf, Spec))

    def here(entry: Entry) -> Leaf:
        leaf = leaf_of(params, entry)
        return leaf if entry.pair is None else jax.tree.map(lambda x: x[entry.pair], leaf)

    for _ in read_entries(Path(directory), cfg, here, experts=experts, progress=progress):
        pass
    return params


def read_entries(
    directory: Path,
    cfg: ModelConfig,
    into: Callable[[Entry], Leaf],
    *,
    experts: Literal["dense", "packed"] = "dense",
    progress: Progress | None = None,
) -> Iterator[tuple[Entry, Leaf]]:
    """The tensors of a checkpoint one after the other, each read into zeros that `into` gives.

    Those are a `Mxfp4` for each matrix of the experts where they are to stay packed.
    Raises as `load_params` does.
    """
    tensors = find_tensors(directory)
    table = entries(cfg)
    check_headers(directory, table, tensors, experts)
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    for entry in table:
        leaf = into(entry)
        packed, broken = isinstance(leaf, Mxfp4), 0
        read = _read_packed if packed else _read_dense
        for infinite, nbytes in read(entry, tensors, leaf):
            broken, done = broken + infinite, done + nbytes
            if progress is not None:
                progress(done, total, entry.name)
        if broken:
            kind = "bfloat16" if packed else leaf.dtype
            raise ConfigError(
                f"{directory}: {entry.name} must be finite in {kind}, got {broken} NaN or "
                "infinite values. Fetch it again, or load another checkpoint."
            )
        yield entry, leaf


def _read_dense(entry: Entry, tensors: dict[str, Stored], leaf: Leaf) -> Iterator[tuple[int, int]]:
    """Fills the leaf; (values not finite, bytes read) of each piece."""
    for start, piece, nbytes in _pieces(entry, tensors):
        with np.errstate(over="ignore"):  # it becomes infinite, and is counted
            piece = piece.astype(leaf.dtype, copy=False)
        _place(leaf, piece, start, entry.layout)
        yield not_finite(piece), nbytes


def _read_packed(entry: Entry, tensors: dict[str, Stored], leaf: Leaf) -> Iterator[tuple[int, int]]:
    """The same for a leaf that stays packed."""
    for e, block, scale in _packed_pieces(entry, tensors):
        packed = map(np.asarray, mxfp4.halved(block[0], scale[0]))
        for ours, theirs in zip(leaf, packed, strict=True):
            _place(ours, theirs[None], e, entry.layout)
        yield mxfp4.infinite(block, scale), block.nbytes + scale.nbytes


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
    for start, block, scale in _packed_pieces(entry, tensors):
        dense = mxfp4.decode(block, scale).swapaxes(1, 2)
        yield start, dense, block.nbytes + scale.nbytes


def _packed_pieces(
    entry: Entry, tensors: dict[str, Stored]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(expert, its blocks, its scales); the first axis is kept."""
    blocks, scales = (read_rows(tensors[entry.name + end], 1) for end in ("_blocks", "_scales"))
    for (start, block), (_, scale) in zip(blocks, scales, strict=True):
        if scale.max() == 255:
            raise ConfigError(
                f"{tensors[entry.name + '_scales'].path}: {entry.name}_scales must be at most 254, "
                f"got 255 (NaN) in {np.count_nonzero(scale == 255)} groups. Fetch it again."
            )
        yield start, block, scale


def iter_hf(
    params: Params, cfg: ModelConfig, dtype: str = "bfloat16"
) -> Iterator[tuple[str, np.ndarray]]:
    """The export stream: (checkpoint name, array), one tensor in memory at a time.

    Packed leaves are decoded, exactly, for a dense dtype; for mxfp4 they are the bytes as loaded.
    Adapters are merged into their base, and rounded once.
    Raises ValueError where a leaf is not the table's or does not fit MXFP4; ConfigError
    for another dtype than bfloat16, float32 or mxfp4 (experts packed, the rest bfloat16).
    """
    check_params(params, cfg)
    for entry in entries(cfg):
        items, leaf = stored(entry, dtype), leaf_of(params, entry)
        if len(items) == 2 and isinstance(leaf, Mxfp4):
            packed = _gather_packed(leaf, entry)
            yield from zip([name for name, _, _ in items], _unpacked(packed, entry), strict=True)
            continue
        ours = gather_entry(params, entry)
        if broken := not_finite(ours):
            raise ConfigError(f"{entry.name} must be finite, got {broken} NaN or infinite values.")
        if len(items) == 1:
            yield entry.name, _to_checkpoint(ours, entry, DTYPES[items[0][1]])
        else:
            yield from zip([name for name, _, _ in items], _pack(ours, entry), strict=True)


def check_params(params: Params, cfg: ModelConfig) -> None:
    """Raises ValueError where a leaf is missing, unknown or of another shape than the table's."""
    got, want = param_shapes(params), param_shapes(param_specs(cfg))
    for name in sorted(got.keys() | want.keys()):
        if got.get(name) != want.get(name):
            raise ValueError(
                f"params {name} must have shape {want.get(name, 'none (unknown)')}, got "
                f"{got.get(name, 'none (missing)')}. Are these the weights of this model config?"
            )


def gather_entry(params: Params, entry: Entry, *, here: bool = True) -> np.ndarray:
    """An entry's array in our layout on the host, as `gather` does it.

    What is packed is decoded, what is adapted is merged, in float32.
    """
    leaf = leaf_of(params, entry)
    if isinstance(leaf, Adapted) and entry.pair is not None:
        return merged_layer(leaf, entry.pair, here=here)
    if not isinstance(leaf, Mxfp4):
        return gather(leaf, entry.pair, here=here)
    packed = _gather_packed(leaf, entry, here=here)
    return mxfp4.decoded(packed) if here else np.empty(0, jax.numpy.bfloat16)


def _gather_packed(leaf: Mxfp4, entry: Entry, *, here: bool = True) -> Mxfp4:
    return jax.tree.map(lambda part: gather(part, entry.pair, here=here), leaf)


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


def _unpacked(ours: Leaf, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """A packed leaf's blocks and scales, as the checkpoint has them."""
    blocks, scales = (np.empty(shape, np.uint8) for _, _, shape in stored(entry, "mxfp4"))
    for e in range(len(blocks)):
        parts = (
            checkpoint_tensor(x[e : e + 1], entry.layout, (1, *x.shape[1:]), x.dtype) for x in ours
        )
        blocks[e], scales[e] = mxfp4.neighboured(*(part[0] for part in parts))
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
    nearest, even; MXFP4 as `mxfp4.encode`, or as loaded.
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
