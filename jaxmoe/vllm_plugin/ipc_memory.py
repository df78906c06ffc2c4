# SPDX-License-Identifier: Apache-2.0
"""A trainer's tensors in the memory of this process's GPU, opened from the driver's handles.

Not yet tested on GPU. Next: jaxmoe/weight_sync/cuda_ipc.py, which makes the handles.
"""

import base64
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import byref, c_uint, c_void_p
from math import prod
from typing import Any

import torch

from jaxmoe.vllm_plugin.manifest import UpdateRejected
from jaxmoe.weight_sync.ipc_handle import IpcMemHandle

_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _Memory:
    """Bytes at an address, as torch takes them in without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def on_gpu(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over memory that is not torch's."""
    return torch.as_tensor(_Memory(address, nbytes), device="cuda")


@contextmanager
def opened(
    info: Any, gpu: str, *, driver: Any = None,
    view: Callable[[int, int], torch.Tensor] = on_gpu,
) -> Iterator[list[tuple[str, torch.Tensor]]]:  # fmt: skip
    """(name, tensor) of update_info's names; the memory is the trainer's, until this ends.

    `gpu` is this process's GPU, by UUID. Raises UpdateRejected for handles of another one.
    """
    cuda = driver or ctypes.CDLL("libcuda.so.1")
    bases = dict[str, int]()
    try:
        yield [
            (name, _tensor(cuda, bases, handles, gpu, view, dtype, shape))
            for name, dtype, shape, handles in zip(
                info.names, info.dtype_names, info.shapes, info.ipc_handles, strict=True
            )
        ]
    finally:
        for base in bases.values():
            cuda.cuIpcCloseMemHandle(c_void_p(base))


def _tensor(
    cuda: Any, bases: dict[str, int], handles: Mapping[str, Sequence[Any]], gpu: str,
    view: Callable[[int, int], torch.Tensor], dtype: str, shape: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    if gpu not in handles:
        raise UpdateRejected(
            f"the trainer's weights lie on GPU {', '.join(handles)}, vLLM runs on {gpu}: memory "
            "can be shared on one GPU only. Try --set rollout.vllm.transport=files."
        )
    handle, offset = handles[gpu]
    if handle not in bases:
        bases[handle] = _open(cuda, base64.b64decode(handle))
    kind = getattr(torch, dtype)
    raw = view(bases[handle] + offset, prod(shape) * kind.itemsize)
    return raw.view(kind).view(list(shape))


def _open(cuda: Any, handle: bytes) -> int:
    base = c_void_p()
    status = cuda.cuIpcOpenMemHandle_v2(
        byref(base), IpcMemHandle.from_buffer_copy(handle), c_uint(_PEERS)
    )
    if status != 0 or base.value is None:
        raise UpdateRejected(f"cuIpcOpenMemHandle failed with CUDA error {status}")
    return base.value
