# SPDX-License-Identifier: Apache-2.0
"""Weights in the memory of a GPU that trainer and vLLM share, by CUDA IPC: no torch, no pickle.

vLLM's own IPC engine takes pickled arguments of a private torch function. Here a tensor is
described by the driver's 64-byte handle of its allocation and by its offset in that allocation,
which JSON can carry; our plugin opens the handles. Requirements: one GPU for trainer and vLLM (no
tensor parallelism beyond it), memory from the driver's plain allocator (XLA_PYTHON_CLIENT_ALLOCATOR
must not be cuda_async), and free memory for a complete copy of the weights.

Not yet tested on GPU: the calls are tested with a driver that records them. Next:
jaxmoe/vllm/plugin/ipc_memory.py, which opens the handles.
"""

import base64
import ctypes
import uuid
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import jax

from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.ipc_handle import IpcMemHandle
from jaxmoe.weight_sync.sent_tensors import Experts, device_sent, list_sent, sent_dtype
from jaxmoe.weight_sync.update import (
    ManifestDict,
    WeightUpdate,
    compute_manifest,
    plan_tensors,
)


def share_ipc_handles(
    params: Params,
    cfg: ModelConfig,
    *,
    dtype: str,
    run: str,
    version: int,
    device: Any = None,
    driver: Any = None,
    experts: Experts = "dense",
    manifest: ManifestDict | None = None,
) -> WeightUpdate:
    """Copy the weights on the device and export handles to that memory; `close` frees the copy.

    update_info is {"names", "dtype_names", "shapes", "manifest", "ipc_handles": [{GPU's UUID:
    [handle in base64, offset in bytes]}]}. Raises ConfigError if there is no NVIDIA driver,
    EngineError if a driver call fails.
    """
    planned, sent = plan_tensors(params, cfg, dtype, experts), list_sent(cfg, experts)
    cuda = _CudaDriver(driver or _load_driver(), device or jax.local_devices()[0])
    manifest = manifest or compute_manifest(
        params, cfg, dtype=dtype, run=run, version=version, experts=experts
    )
    arrays = [device_sent(params, entry, dtype, cuda.device) for entry in sent]
    # vLLM reads this memory outside of jax's streams, so the copies must be complete.
    handles = [cuda.export_handle(array) for array in jax.block_until_ready(arrays)]
    update_info = {
        "names": [name for name, _, _ in planned],
        "dtype_names": [sent_dtype(entry, dtype) for entry in sent],
        "shapes": [list(shape) for _, _, shape in planned],
        "ipc_handles": [{cuda.uuid: handle} for handle in handles],
        "manifest": manifest,
    }
    # A handle is valid as long as its array lives.
    return WeightUpdate(manifest, update_info, close=arrays.clear)


class _CudaDriver:
    """CUDA's driver API, in the primary context of one device, which XLA uses as well."""

    def __init__(self, library: Any, device: Any) -> None:
        self._library, self.device = library, device
        number, context, name = c_int(), c_void_p(), IpcMemHandle()
        self._call_driver("cuInit", 0)
        self._call_driver("cuDeviceGet", byref(number), c_int(device.local_hardware_id or 0))
        self._call_driver("cuDeviceGetUuid_v2", byref(name), number)
        self._call_driver("cuDevicePrimaryCtxRetain", byref(context), number)
        # A thread's calls need a current context, and XLA's is current only in its own threads.
        self._call_driver("cuCtxSetCurrent", context)
        self.uuid = str(uuid.UUID(bytes=bytes(name.reserved[:16])))

    def export_handle(self, array: jax.Array) -> list[Any]:
        """Return [handle of the allocation in base64, offset of the array in it in bytes]."""
        address, base, size = array.unsafe_buffer_pointer(), c_void_p(), c_size_t()
        handle = IpcMemHandle()
        # CUDA shares allocations, and XLA places many arrays in one of its own.
        self._call_driver("cuMemGetAddressRange_v2", byref(base), byref(size), c_void_p(address))
        self._call_driver("cuIpcGetMemHandle", byref(handle), base)
        return [base64.b64encode(bytes(handle.reserved)).decode(), address - (base.value or 0)]

    def _call_driver(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise EngineError(
                f"{name} failed with CUDA error {status}. Memory can be shared if trainer and vLLM "
                "use the same GPU and XLA_PYTHON_CLIENT_ALLOCATOR is not cuda_async; otherwise try "
                "--set rollout.vllm.transport=files."
            )


def _load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            "rollout.vllm.transport=ipc needs an NVIDIA GPU and its driver; libcuda.so.1 was not "
            "found on this machine. Try --set rollout.vllm.transport=files."
        ) from error
