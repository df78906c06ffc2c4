# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints in and out: safetensors, sharded or not, bf16, f16, f32 or MXFP4.

`list_entries(cfg)` lists the tensors of a checkpoint; import, export and every check use that
list. All names and shapes are checked from the files' headers before data is read, and data is
read in chunks directly into the stacked arrays, so a load needs little more memory than its
result. Experts in four bits are decoded, or stay packed; then an export writes the same bytes.
Next: jaxmoe/checkpoint/entries.py has the list, headers.py checks it; mxfp4.py, tensor_files.py.
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
from jaxmoe.checkpoint.entries import Entry, leaf_of, list_entries, plan_entry, planned_tensors
from jaxmoe.checkpoint.headers import check_packable, read_headers
from jaxmoe.checkpoint.layouts import checkpoint_tensor, zeros_to_share
from jaxmoe.checkpoint.merge import gather_codes, gather_dense
from jaxmoe.checkpoint.tensor_files import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    PlannedTensor,
    StoredTensor,
    count_not_finite,
    plan_shards,
    planned_bytes,
    read_tensor_rows,
    write_shard,
)
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.config.file_sums import write_file_sums
from jaxmoe.model.config import to_hf
from jaxmoe.model.params import Layout, Spec, param_shapes, param_specs, read_dtype
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_CHUNK_BYTES = 8 * 2**20  # read at a time; at least one expert


def load_params(
    directory: str | Path,
    cfg: ModelConfig,
    dtype: str | None = None,
    *,
    experts: Literal["dense", "packed"] = "dense",
) -> Params:
    """The weights of a checkpoint folder as numpy arrays in our layout; padding rows are 0.

    On a CPU, `jax.device_put` of these arrays does not copy them; `jnp.asarray` does.
    Args:
        dtype: None for the config's dtype; "as_read" for the dtype in which the forward reads each
            parameter: matrices in the config's dtype, the rest in float32.
        experts: "packed" keeps the experts' matrices in four bits, as `Mxfp4` leaves; the
            checkpoint must store them so (`packed.pack_experts` encodes dense ones).
    Numerics: MXFP4 decodes exactly; a narrower `dtype` than the file's rounds to nearest, even.
    Raises: ConfigError, from headers alone, for a missing or unknown tensor, a wrong shape or
        dtype, a missing shard or a truncated file; from the data for NaN, infinity, and for files
        written by jaxmoe, which contain digests, for changed bits.
    """
    if experts == "packed":
        check_packable(cfg)

    def init_leaf(spec: Spec) -> Leaf:
        if experts == "packed" and spec.is_packable:
            return mxfp4.init_packed(spec.shape)
        leaf_dtype = read_dtype(spec, cfg, "float32") if dtype == "as_read" else dtype or cfg.dtype
        return zeros_to_share(spec.shape, jax.numpy.dtype(leaf_dtype))

    specs = param_specs(cfg)
    params = jax.tree.map(init_leaf, specs, is_leaf=lambda leaf: isinstance(leaf, Spec))

    def leaf_of_entry(entry: Entry) -> Leaf:
        # The views of a stacked array let a tensor be read directly into its place.
        leaf = leaf_of(params, entry)
        return leaf if entry.index is None else jax.tree.map(lambda x: x[entry.index], leaf)

    for _ in read_entries(Path(directory), cfg, leaf_of_entry, experts=experts):
        pass
    return params


def read_entries(
    directory: Path,
    cfg: ModelConfig,
    init_leaf: Callable[[Entry], Leaf],
    *,
    experts: Literal["dense", "packed"] = "dense",
) -> Iterator[tuple[Entry, Leaf]]:
    """Read the tensors of a checkpoint one by one, each into the zeros that `init_leaf` returns.

    For packed experts, `init_leaf` returns a `Mxfp4` for each of their matrices.
    Raises: ConfigError as `load_params` does.
    """
    table, tensors = read_headers(directory, cfg, experts)
    for entry in table:
        leaf = init_leaf(entry)
        read, kind = _read_packed, "bfloat16"
        if not isinstance(leaf, Mxfp4):
            read, kind = _read_dense, leaf.dtype
        if n_bad := sum(read(entry, tensors, leaf)):
            raise ConfigError(
                f"{directory}: {entry.name} must be finite in {kind}, got {n_bad} NaN or "
                "infinite values. Fetch it again, or load another checkpoint."
            )
        yield entry, leaf


def _read_dense(entry: Entry, tensors: dict[str, StoredTensor], leaf: Leaf) -> Iterator[int]:
    """Read into a dense leaf; yields the number of non-finite values of each chunk."""
    for start, chunk in _read_chunks(entry, tensors):
        # An overflow gives infinity, which is counted below.
        with np.errstate(over="ignore"):
            chunk = chunk.astype(leaf.dtype, copy=False)
        _write_rows(leaf, chunk, start, entry.layout)
        yield count_not_finite(chunk)


def _read_packed(entry: Entry, tensors: dict[str, StoredTensor], leaf: Leaf) -> Iterator[int]:
    """Read into a packed leaf; yields as `_read_dense`."""
    for e, block, scale in _read_packed_chunks(entry, tensors):
        packed = map(np.asarray, mxfp4.blocks_to_halves(block[0], scale[0]).codes)
        for half, chunk in zip(leaf.codes, packed, strict=True):
            _write_rows(half, chunk[None], e, entry.layout)
        yield mxfp4.count_infinite(block, scale)


def _write_rows(param: np.ndarray, rows: np.ndarray, start: int, layout: Layout) -> None:
    """Write rows start… of a checkpoint tensor into our layout of the parameter."""
    stop = start + len(rows)
    if layout in ("transpose", "transpose_pad"):
        param[:, start:stop] = rows.T
    elif layout in ("gate_up", "gate_up_bias"):
        half = param.shape[-1] // 2
        param[start:stop, ..., :half] = rows[..., 0::2]
        param[start:stop, ..., half:] = rows[..., 1::2]
    else:
        param[start:stop] = rows


def _read_chunks(
    entry: Entry, tensors: dict[str, StoredTensor]
) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of each chunk of a tensor, dense and in its file's layout."""
    if entry.name in tensors:
        tensor = tensors[entry.name]
        rows = max(1, _CHUNK_BYTES * tensor.shape[0] // tensor.nbytes)
        yield from read_tensor_rows(tensor, rows)
        return
    for start, block, scale in _read_packed_chunks(entry, tensors):
        yield start, mxfp4.decode_blocks(block, scale).swapaxes(1, 2)


def _read_packed_chunks(
    entry: Entry, tensors: dict[str, StoredTensor]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(expert index, blocks [1, …], scales [1, …]) of each expert."""
    blocks, scales = (
        read_tensor_rows(tensors[entry.name + end], 1) for end in ("_blocks", "_scales")
    )
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
    """(checkpoint name, array) of each tensor to export, one in memory at a time.

    For a dense dtype, packed leaves are decoded exactly; for mxfp4, their bytes are unchanged.
    Adapters are merged into their base and rounded once.
    dtype: bfloat16, float32 or mxfp4 (experts packed, the rest in the model's dtype: in bfloat16
        the released layout).
    Raises: ValueError if a leaf is not in the table or does not fit MXFP4; ConfigError for another
        dtype or a non-finite value.
    """
    check_param_tree(params, cfg)
    for entry in list_entries(cfg):
        items, leaf = plan_entry(entry, dtype, cfg.dtype), leaf_of(params, entry)
        if len(items) == 2 and isinstance(leaf, Mxfp4):
            packed = gather_codes(leaf, entry.index)
            yield from zip(
                [name for name, _, _ in items], _packed_bytes(packed, entry), strict=True
            )
            continue
        param = gather_entry(params, entry)
        if n_bad := count_not_finite(param):
            raise ConfigError(f"{entry.name} must be finite, got {n_bad} NaN or infinite values.")
        if len(items) == 1:
            yield entry.name, _to_checkpoint(param, entry, DTYPES[items[0][1]])
        else:
            yield from zip(
                [name for name, _, _ in items], _encode_experts(param, entry), strict=True
            )


def check_param_tree(params: Params, cfg: ModelConfig) -> None:
    """Raise ValueError if a leaf is missing, unknown or has another shape than in the table."""
    actual, expected = param_shapes(params), param_shapes(param_specs(cfg))
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise ValueError(
                f"params {name} must have shape {expected.get(name, 'none (unknown)')}, got "
                f"{actual.get(name, 'none (missing)')}. Are these the weights of this model config?"
            )


def gather_entry(params: Params, entry: Entry, *, receives: bool = True) -> np.ndarray:
    """An entry's array in our layout on the host, gathered by `gather_leaf`.

    Packed leaves are decoded; adapted leaves are merged, in float32.
    """
    return gather_dense(leaf_of(params, entry), entry.index, receives=receives)


def _to_checkpoint(param: np.ndarray, entry: Entry, dtype: np.dtype) -> np.ndarray:
    """The inverse of `_write_rows`; padding is removed."""
    return checkpoint_tensor(param, entry.layout, entry.shape, dtype)


def _encode_experts(param: np.ndarray, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 blocks and scales of dense experts, encoded one expert at a time."""
    blocks, scales = (np.empty(shape, np.uint8) for _, _, shape in plan_entry(entry, "mxfp4"))
    one_expert = replace(entry, shape=(1, *entry.shape[1:]))
    for e in range(len(param)):
        dense = _to_checkpoint(param[e : e + 1], one_expert, DTYPES["F32"])
        blocks[e : e + 1], scales[e : e + 1] = mxfp4.encode_blocks(dense.swapaxes(1, 2))
    return blocks, scales


def _packed_bytes(packed: Leaf, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales of a packed leaf, in the checkpoint's layout."""
    blocks, scales = (np.empty(shape, np.uint8) for _, _, shape in plan_entry(entry, "mxfp4"))
    for e in range(len(blocks)):
        parts = (
            checkpoint_tensor(x[e : e + 1], entry.layout, (1, *x.shape[1:]), x.dtype)
            for x in packed.codes
        )
        blocks[e], scales[e] = mxfp4.halves_to_blocks(*(part[0] for part in parts))
    return blocks, scales


def save_params(
    params: Params,
    cfg: ModelConfig,
    directory: str | Path,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
    add_files: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write config.json and *.safetensors that `transformers` and vLLM read.

    All files, including those that `add_files` writes, go to DIRECTORY.partial, which is renamed
    at the end, so DIRECTORY is complete or absent. The safetensors contain a digest of every
    tensor, jaxmoe.sha256 the checksums of the other files.
    Numerics: float32 to bfloat16 rounds to nearest, even; MXFP4 as in `mxfp4.encode_blocks`, or
    the loaded bytes.
    Raises: ConfigError if the directory is not empty, the disk is full, a weight is not finite, or
        the shapes do not fit MXFP4.
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
        _write_shards(params, cfg, partial, dtype, plan_shards(planned, max_shard_bytes))
        add_files(partial)
        write_file_sums(partial)
        partial.replace(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} must be a folder that can be created and written; {error}. Partial files "
            "were removed. Free some space, or name another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_export(cfg: ModelConfig, directory: Path, dtype: str) -> list[PlannedTensor]:
    """The tensors that an export would write. Raises ConfigError if it is not possible."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} must be new or empty for an export. Name another one.")
    if dtype == "mxfp4" and (cfg.d_model % mxfp4.GROUP or cfg.d_expert % mxfp4.GROUP):
        raise ConfigError(
            f"MXFP4 needs model.d_model ({cfg.d_model}) and model.d_expert ({cfg.d_expert}) to be "
            "multiples of 32. Try --set save.export_dtype=bfloat16."
        )
    return planned_tensors(cfg, dtype)


def _write_shards(
    params: Params, cfg: ModelConfig, folder: Path, dtype: str, shards: list[list[PlannedTensor]]
) -> None:
    stream, file_of_tensor, total = iter_hf(params, cfg, dtype), dict[str, str](), 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = SINGLE_FILE if len(shards) == 1 else name
        total += write_shard(folder / name, shard, stream)
        file_of_tensor |= dict.fromkeys((tensor for tensor, _, _ in shard), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))
    config = to_hf(cfg, dtype=cfg.dtype if dtype == "mxfp4" else dtype)
    packed = {"quantization_config": QUANTIZATION} if dtype == "mxfp4" else {}
    (folder / "config.json").write_text(json.dumps(config | packed, indent=2))
