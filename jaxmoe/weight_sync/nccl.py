# SPDX-License-Identifier: Apache-2.0
"""Weights from GPU to GPU by NCCL, through ctypes: the trainer needs no torch.

vLLM's own transfer engine is the other end, as ranks 1 and up. Both sides call ncclCommInitRank
with one unique id, then sum one float32, then broadcast every tensor from rank 0, in the order that
update_info announces.

Not yet tested on GPU: the calls, their order and arguments are tested with a library that records
them. Next: jaxmoe/vllm/plugin/direct.py, which receives.
"""

import base64
import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.sent_tensors import Experts, device_sent, list_sent, sent_dtype
from jaxmoe.weight_sync.update import (
    ManifestDict,
    WeightUpdate,
    compute_manifest,
    plan_tensors,
)

NCCL_DTYPES = {"uint8": 1, "float32": 7, "bfloat16": 9}  # ncclDataType_t of nccl.h
_SUM = 0  # ncclRedOp_t
_STREAM = None  # CUDA's default stream; jax's own work has finished before it is used
_LIBRARIES = {
    "nccl": ("libnccl.so.2", ("nvidia/nccl",)),
    "cudart": ("libcudart.so.13", ("nvidia/cu13", "nvidia/cuda_runtime")),
}


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class NcclGroup:
    """The trainer as rank 0, and `workers` processes of vLLM as the other ranks.

    `init_info` is for vLLM's init_weight_transfer_engine. `join` must run concurrently with that
    call, since both return only when all ranks have joined.
    """

    def __init__(
        self,
        workers: int,
        *,
        device: Any = None,
        nccl: Any = None,
        cudart: Any = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"NCCL needs at least one process of vLLM, got {workers}.")
        self._nccl, self._cudart = nccl or _load_library("nccl"), cudart or _load_library("cudart")
        self.device = device or jax.local_devices()[0]
        self._size, self._communicator, self._id = workers + 1, c_void_p(), UniqueId()
        self._nccl_call("ncclGetUniqueId", byref(self._id))
        self.init_info: dict[str, Any] = {
            "rank_offset": 1,
            "world_size": self._size,
            "nccl_unique_id_b64": base64.b64encode(bytes(self._id.internal)).decode(),
            # Packed, vLLM would expect several tensors in each broadcast.
            "packed": False,
        }

    def join(self) -> None:
        """Join the group; returns when all ranks have joined. Raises EngineError if NCCL fails."""
        # vLLM's ranks begin with this all-reduce, which would wait for rank 0 without end.
        summand = jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), self.device))
        self._use_device()
        rank, size = c_int(0), c_int(self._size)
        self._nccl_call("ncclCommInitRank", byref(self._communicator), size, self._id, rank)
        pointer, kind = _device_pointer(summand), c_int(NCCL_DTYPES["float32"])
        self._nccl_call(
            "ncclAllReduce",
            pointer,
            pointer,
            c_size_t(1),
            kind,
            c_int(_SUM),
            self._communicator,
            _STREAM,
        )
        self._synchronize_stream()

    def send(self, array: jax.Array) -> None:
        """Broadcast one array of the group's device; it may be freed when this returns."""
        if not self._communicator:
            raise EngineError("the NCCL group must be joined before weights are sent: call join().")
        self._use_device()
        pointer, count = _device_pointer(array), c_size_t(array.size)
        kind, root = c_int(NCCL_DTYPES[str(array.dtype)]), c_int(0)
        self._nccl_call(
            "ncclBroadcast", pointer, pointer, count, kind, root, self._communicator, _STREAM
        )
        self._synchronize_stream()

    def close(self) -> None:
        """Leave the group without waiting for workers, which may be gone; may be called twice."""
        # ncclCommDestroy would wait for the other ranks.
        communicator, self._communicator = self._communicator, c_void_p()
        if communicator:  # the field is cleared first; a thread inside a call gets an error
            self._nccl_call("ncclCommAbort", communicator)

    def _use_device(self) -> None:
        """Select the device: CUDA's current device is per thread, and any thread may call."""
        self._cuda_call("cudaSetDevice", c_int(self.device.local_hardware_id or 0))

    def _synchronize_stream(self) -> None:
        self._cuda_call("cudaStreamSynchronize", _STREAM)

    def _nccl_call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._nccl, name)(*arguments)
        if status != 0:
            text = self._nccl.ncclGetErrorString
            # ctypes assumes that functions return an int, which cuts off a pointer.
            text.restype = ctypes.c_char_p
            raise EngineError(
                f"{name} failed: {text(c_int(status)).decode()}. Set NCCL_DEBUG=INFO for details, "
                "or try --set rollout.vllm.transport=files."
            )

    def _cuda_call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cudart, name)(*arguments)
        if status != 0:
            raise EngineError(f"{name} failed with CUDA error {status}.")


def broadcast_weights(
    group: NcclGroup,
    params: Params,
    cfg: ModelConfig,
    *,
    dtype: str,
    run: str,
    version: int,
    experts: Experts = "dense",
    manifest: ManifestDict | None = None,
) -> WeightUpdate:
    """Return an update whose `send` broadcasts the weights in update_info's order, one by one.

    Device memory: one tensor and one copy. Each tensor also passes through the host once, for its
    digest.
    """
    planned = plan_tensors(params, cfg, dtype, experts)
    manifest = manifest or compute_manifest(
        params, cfg, dtype=dtype, run=run, version=version, experts=experts
    )
    update_info = {
        "names": [name for name, _, _ in planned],
        "dtype_names": [sent_dtype(e, dtype) for e in list_sent(cfg, experts)],
        "shapes": [list(shape) for _, _, shape in planned],
        "manifest": manifest,
    }
    send = partial(_send_tensors, group, params, cfg, dtype, experts)
    return WeightUpdate(manifest, update_info, send=send)


def _send_tensors(
    group: NcclGroup, params: Params, cfg: ModelConfig, dtype: str, experts: Experts
) -> None:
    for entry in list_sent(cfg, experts):
        group.send(jax.block_until_ready(device_sent(params, entry, dtype, group.device)))


def _device_pointer(array: jax.Array) -> c_void_p:
    return c_void_p(array.unsafe_buffer_pointer())


def _load_library(name: str) -> ctypes.CDLL:
    """Load the library that jax's CUDA plugin has loaded or installed. Raises ConfigError."""
    file, folders = _LIBRARIES[name]
    nvidia = find_spec("nvidia")
    roots = (
        [Path(path).parent for path in (nvidia.submodule_search_locations or [])] if nvidia else []
    )
    paths = [file, *(str(root / folder / "lib" / file) for root in roots for folder in folders)]
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise ConfigError(
        f"rollout.vllm.transport=nccl needs {file}, which was not found on this machine. Type "
        "pip install 'jax[cuda13]' on a machine with NVIDIA GPUs, or try --set "
        "rollout.vllm.transport=files."
    )
