# SPDX-License-Identifier: Apache-2.0
"""Open a trainer's tensors in the memory of this process's GPU from the driver's handles.

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

from jaxmoe.vllm.plugin.manifest import UpdateRejected
from jaxmoe.weight_sync.ipc_handle import IpcMemHandle

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag


class _CudaBytes:
    """Bytes at an address, in a form that torch reads without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def view_gpu_memory(address: int, nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor [nbytes] over memory that torch did not allocate."""
    return torch.as_tensor(_CudaBytes(address, nbytes), device="cuda")


@contextmanager
def open_shared_tensors(
    info: Any,
    gpu: str,
    *,
    driver: Any = None,
    view: Callable[[int, int], torch.Tensor] = view_gpu_memory,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield (name, tensor) of update_info's names, in the trainer's memory; closed at the end.

    `gpu` is the UUID of this process's GPU. Raises UpdateRejected for handles of another GPU.
    """
    cuda = driver or ctypes.CDLL("libcuda.so.1")
    bases = dict[str, int]()
    try:
        yield [
            (name, _open_tensor(cuda, bases, handles, gpu, view, dtype, shape))
            for name, dtype, shape, handles in zip(
                info.names, info.dtype_names, info.shapes, info.ipc_handles, strict=True
            )
        ]
    finally:
        for base in bases.values():
            cuda.cuIpcCloseMemHandle(c_void_p(base))


def _open_tensor(
    cuda: Any,
    bases: dict[str, int],
    handles: Mapping[str, Sequence[Any]],
    gpu: str,
    view: Callable[[int, int], torch.Tensor],
    dtype: str,
    shape: Sequence[int],
) -> torch.Tensor:
    if gpu not in handles:
        raise UpdateRejected(
            f"the trainer's weights are on GPU {', '.join(handles)}, vLLM runs on {gpu}: memory "
            "can only be shared on the same GPU. Try --set rollout.vllm.transport=files."
        )
    handle, offset = handles[gpu]
    # An allocation holds many tensors, and is opened once for all of them.
    if handle not in bases:
        bases[handle] = _open_handle(cuda, base64.b64decode(handle))
    kind = getattr(torch, dtype)
    raw = view(bases[handle] + offset, prod(shape) * kind.itemsize)
    return raw.view(kind).view(list(shape))


def _open_handle(cuda: Any, handle: bytes) -> int:
    base = c_void_p()
    status = cuda.cuIpcOpenMemHandle_v2(
        byref(base), IpcMemHandle.from_buffer_copy(handle), c_uint(_LAZY_PEER_ACCESS)
    )
    if status != 0 or base.value is None:
        raise UpdateRejected(f"cuIpcOpenMemHandle failed with CUDA error {status}")
    return base.value
