# SPDX-License-Identifier: Apache-2.0
"""The tensors of a weight update: those of a checkpoint, its experts dense or in four bits.

In four bits each of the experts' two matrices is sent as two tensors of bytes, "…_blocks" and
"…_scales", in the layout of the released checkpoint. Next: jaxmoe/weight_sync/update.py.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.entries import Entry, leaf_of, list_entries, plan_entry
from jaxmoe.checkpoint.hf import gather_entry
from jaxmoe.checkpoint.layouts import checkpoint_tensor, device_tensor, gather_leaf
from jaxmoe.checkpoint.tensor_files import PlannedTensor
from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

Experts = Literal["dense", "packed"]


@dataclass(frozen=True, kw_only=True)
class PackedPart(Entry):
    """The blocks or the scales of one of the experts' matrices, as a tensor of its own."""

    matrix: Entry  # of the same leaf

    @property
    def is_scales(self) -> bool:
        return self.name.endswith("_scales")


def list_sent(cfg: ModelConfig, experts: Experts) -> list[Entry]:
    """Return the tensors in the order in which they are sent, that of a checkpoint."""
    sent = list[Entry]()
    for entry in list_entries(cfg):
        if experts == "dense" or not entry.is_packable:
            sent.append(entry)
            continue
        sent += [
            PackedPart(
                name,
                shape,
                entry.param_shape,
                entry.keys,
                entry.index,
                "same",
                entry.read,
                matrix=entry,
            )
            for name, _, shape in plan_entry(entry, "mxfp4")
        ]
    return sent


def sent_dtype(entry: Entry, dtype: str) -> str:
    """Return the dtype in which a tensor is sent: float32 if the trainer does not round it either.

    An engine that computes in bfloat16 may round it when it loads; vLLM 0.32 rounds router, norms,
    biases and sinks.
    """
    if isinstance(entry, PackedPart):
        return "uint8"
    return dtype if entry.read == "compute" else "float32"


def plan_sent(entry: Entry, dtype: str) -> PlannedTensor:
    """Return (name, safetensors dtype, shape) of one tensor."""
    if isinstance(entry, PackedPart):
        return entry.name, "U8", entry.shape
    (planned,) = plan_entry(entry, sent_dtype(entry, dtype))
    return planned


def gather_sent(params: Params, entry: Entry, *, receives: bool = True) -> np.ndarray:
    """Return a tensor's array on the host: in our layout, or packed bytes in the checkpoint's.

    With several processes, a collective operation, as `gather_leaf`.
    """
    if not isinstance(entry, PackedPart):
        return gather_entry(params, entry, receives=receives)
    packed = _packed_leaf(params, entry)
    part = packed.scales_EDF if entry.is_scales else packed.nibbles_EDF
    part = gather_leaf(part, entry.index, receives=receives)
    if not receives:
        return part
    out = np.empty(entry.shape, np.uint8)

    def convert_expert(e: int) -> None:
        shape = (1, *part.shape[1:])
        (x,) = checkpoint_tensor(part[e : e + 1], entry.matrix.layout, shape, part.dtype)
        out[e] = x.T if entry.is_scales else mxfp4.nibbles_to_blocks(x)

    with ThreadPoolExecutor() as pool:  # numpy releases the interpreter's lock
        list(pool.map(convert_expert, range(len(out))))
    return out


def device_sent(params: Params, entry: Entry, dtype: str, device: Any) -> jax.Array:
    """Return a tensor in the checkpoint's layout on one device, which needs room for two copies."""
    if not isinstance(entry, PackedPart):
        leaf, kind = leaf_of(params, entry), sent_dtype(entry, dtype)
        return device_tensor(leaf, entry.index, entry.layout, entry.shape, kind, device)
    packed = _packed_leaf(params, entry)
    part = packed.scales_EDF if entry.is_scales else packed.nibbles_EDF
    shape = part.shape if entry.index is None else part.shape[1:]
    part = device_tensor(part, entry.index, entry.matrix.layout, shape, "uint8", device)
    return jnp.swapaxes(part, 1, 2) if entry.is_scales else _nibbles_to_blocks(part)


def _nibbles_to_blocks(nibbles_EDF: UInt8[Array, "E D_half F"]) -> UInt8[Array, "E F G 16"]:
    """`mxfp4.nibbles_to_blocks` of all experts, on the device."""
    even_rows, odd_rows = nibbles_EDF[:, 0::2], nibbles_EDF[:, 1::2]
    low = (even_rows & 15) | (odd_rows << 4)
    high = (even_rows >> 4) | (odd_rows & 240)
    bytes_EFD = jnp.swapaxes(jnp.concatenate([low, high], axis=1), 1, 2)
    return bytes_EFD.reshape(*bytes_EFD.shape[:2], -1, mxfp4.GROUP // 2)


def _packed_leaf(params: Params, entry: Entry) -> Mxfp4:
    leaf = leaf_of(params, entry)
    if not isinstance(leaf, Mxfp4):
        raise ValueError(f"{entry.name} needs packed experts; params have {type(leaf).__name__}.")
    return leaf
