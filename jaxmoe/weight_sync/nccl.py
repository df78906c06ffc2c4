# SPDX-License-Identifier: Apache-2.0
"""Weights from GPU to GPU by NCCL, through ctypes: a trainer without torch.

vLLM's own transfer engine is at the other end, as rank 1 and up. Both sides enter ncclCommInitRank
with one unique id, then a sum of one float32, then one broadcast from rank 0 for each tensor, in
the order that update_info announces.

Not yet tested on GPU: the calls, their order and arguments are tested with a library that records
them. Next: jaxmoe/vllm_plugin/direct.py, which receives.
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

from jaxmoe.checkpoint.entries import entries, leaf_of
from jaxmoe.checkpoint.layouts import device_tensor
from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate, digested, plan, sent_as

TYPES = {"float32": 7, "bfloat16": 9}  # ncclDataType_t of nccl.h
_SUM = 0  # ncclRedOp_t
_STREAM = None  # CUDA's default stream; what jax computes is waited for before
_LIBRARIES = {
    "nccl": ("libnccl.so.2", ("nvidia/nccl",)),
    "cudart": ("libcudart.so.13", ("nvidia/cu13", "nvidia/cuda_runtime")),
}


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class NcclGroup:
    """The trainer as rank 0, and `workers` processes of vLLM.

    `init_info` is for vLLM's init_weight_transfer_engine; `join` must run beside that call, since
    both return only when all ranks are there.
    """

    def __init__(
        self, workers: int, *, device: Any = None, nccl: Any = None,
        cudart: Any = None,
    ) -> None:  # fmt: skip
        if workers < 1:
            raise ConfigError(f"NCCL needs at least one process of vLLM, got {workers}.")
        self._nccl, self._cudart = nccl or _library("nccl"), cudart or _library("cudart")
        self.device = device or jax.local_devices()[0]
        self._size, self._communicator, self._id = workers + 1, c_void_p(), UniqueId()
        self._nccl_call("ncclGetUniqueId", byref(self._id))
        self.init_info: dict[str, Any] = {
            "rank_offset": 1,
            "world_size": self._size,
            "nccl_unique_id_b64": base64.b64encode(bytes(self._id.internal)).decode(),
            "packed": False,
        }

    def join(self) -> None:
        """Meet the workers; returns when all are there. Raises EngineError where NCCL does."""
        one = jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), self.device))
        self._use_device()
        rank, size = c_int(0), c_int(self._size)
        self._nccl_call("ncclCommInitRank", byref(self._communicator), size, self._id, rank)
        at, kind = _pointer(one), c_int(TYPES["float32"])
        self._nccl_call(
            "ncclAllReduce", at, at, c_size_t(1), kind, c_int(_SUM), self._communicator, _STREAM
        )
        self._wait()

    def send(self, array: jax.Array) -> None:
        """Broadcast one array of the group's device; its memory may go when this returns."""
        if not self._communicator:
            raise EngineError("the NCCL group must be joined before weights are sent: call join().")
        self._use_device()
        at, count = _pointer(array), c_size_t(array.size)
        kind, root = c_int(TYPES[str(array.dtype)]), c_int(0)
        self._nccl_call("ncclBroadcast", at, at, count, kind, root, self._communicator, _STREAM)
        self._wait()

    def close(self) -> None:
        """Leave the group, without its workers, which may be gone; may be called twice."""
        communicator, self._communicator = self._communicator, c_void_p()
        if communicator:  # out of reach first: who is in a call is woken by an error
            self._nccl_call("ncclCommAbort", communicator)

    def _use_device(self) -> None:
        """CUDA's current device is the thread's, and each call may be of another thread."""
        self._cuda_call("cudaSetDevice", c_int(self.device.local_hardware_id or 0))

    def _wait(self) -> None:
        self._cuda_call("cudaStreamSynchronize", _STREAM)

    def _nccl_call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._nccl, name)(*arguments)
        if status != 0:
            text = self._nccl.ncclGetErrorString
            text.restype = ctypes.c_char_p
            raise EngineError(
                f"{name} failed: {text(c_int(status)).decode()}. NCCL_DEBUG=INFO tells more; try "
                "--set rollout.vllm.transport=files."
            )

    def _cuda_call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cudart, name)(*arguments)
        if status != 0:
            raise EngineError(f"{name} failed with CUDA error {status}.")


def broadcast(
    group: NcclGroup, params: Params, cfg: ModelConfig, *, dtype: str, run: str, version: int,
    manifest: ManifestDict | None = None,
) -> WeightUpdate:  # fmt: skip
    """Weights that `send` broadcasts in the order of update_info, one tensor at a time.

    Memory on the device: the tensor at hand and one copy. Each tensor also passes through the
    host once, for its digest.
    """
    planned = plan(params, cfg, dtype)
    manifest = manifest or digested(params, cfg, dtype=dtype, run=run, version=version)
    update_info = {
        "names": [name for name, _, _ in planned],
        "dtype_names": [sent_as(e, dtype) for e in entries(cfg)],
        "shapes": [list(shape) for _, _, shape in planned],
        "manifest": manifest,
    }
    send = partial(_send, group, params, cfg, dtype)
    return WeightUpdate(manifest, update_info, send=send)


def _send(group: NcclGroup, params: Params, cfg: ModelConfig, dtype: str) -> None:
    for entry in entries(cfg):
        leaf, layout = leaf_of(params, entry), entry.layout
        kind = sent_as(entry, dtype)
        array = device_tensor(leaf, entry.pair, layout, entry.shape, kind, group.device)
        group.send(jax.block_until_ready(array))


def _pointer(array: jax.Array) -> c_void_p:
    return c_void_p(array.unsafe_buffer_pointer())


def _library(name: str) -> ctypes.CDLL:
    """The library that jax's CUDA plugin has loaded or brought along. Raises ConfigError."""
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
        f"rollout.vllm.transport=nccl needs {file}, which is not to be found here. Type "
        "pip install 'jax[cuda13]' on a machine with NVIDIA GPUs, or --set "
        "rollout.vllm.transport=files."
    )
