# SPDX-License-Identifier: Apache-2.0
"""Weights in the memory of a GPU that trainer and vLLM share, by CUDA IPC: no torch, no pickle.

vLLM's own IPC engine takes pickled arguments of a private function of torch. Here a tensor goes as
the driver's 64-byte handle of its allocation and its offset in it, which JSON can carry; our
plugin opens them. It needs one GPU for both (no tensor parallelism beyond it), memory of the
driver's plain allocator (XLA_PYTHON_CLIENT_ALLOCATOR must not be cuda_async), and room on it for
a whole copy of the weights.

Not yet tested on GPU: the calls are tested with a driver that records them.
Next: jaxmoe/vllm_plugin/ipc_memory.py, which opens the handles.
"""

import base64
import ctypes
import uuid
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import jax

from jaxmoe.checkpoint.entries import entries, leaf_of
from jaxmoe.checkpoint.layouts import device_tensor
from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.ipc_handle import IpcMemHandle
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate, digested, plan, sent_as


def share_ipc_handles(
    params: Params, cfg: ModelConfig, *, dtype: str, run: str, version: int, device: Any = None,
    driver: Any = None, manifest: ManifestDict | None = None,
) -> WeightUpdate:  # fmt: skip
    """Lay a copy of the weights on the device and name its memory; `close` lets it go.

    update_info is {"names", "dtype_names", "shapes", "manifest", "ipc_handles": [{GPU's UUID:
    [handle in base64, offset in bytes]}]}.
    Raises ConfigError where there is no NVIDIA driver, EngineError where it refuses.
    """
    planned = plan(params, cfg, dtype)
    cuda = _Driver(driver or _library(), device or jax.local_devices()[0])
    manifest = manifest or digested(params, cfg, dtype=dtype, run=run, version=version)
    arrays = [
        device_tensor(leaf_of(params, e), e.pair, e.layout, e.shape, sent_as(e, dtype), cuda.device)
        for e in entries(cfg)
    ]
    where = [cuda.handle_of(array) for array in jax.block_until_ready(arrays)]
    update_info = {
        "names": [name for name, _, _ in planned],
        "dtype_names": [sent_as(e, dtype) for e in entries(cfg)],
        "shapes": [list(shape) for _, _, shape in planned],
        "ipc_handles": [{cuda.uuid: handle} for handle in where],
        "manifest": manifest,
    }
    return WeightUpdate(manifest, update_info, close=arrays.clear)


class _Driver:
    """CUDA's driver API, in the context of one device that XLA uses too."""

    def __init__(self, library: Any, device: Any) -> None:
        self._library, self.device = library, device
        number, context, name = c_int(), c_void_p(), IpcMemHandle()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(number), c_int(device.local_hardware_id or 0))
        self._call("cuDeviceGetUuid_v2", byref(name), number)
        self._call("cuDevicePrimaryCtxRetain", byref(context), number)
        self._call("cuCtxSetCurrent", context)
        self.uuid = str(uuid.UUID(bytes=bytes(name.reserved[:16])))

    def handle_of(self, array: jax.Array) -> list[Any]:
        """[handle of the allocation, base64; where in it the array begins, bytes]."""
        at, base, size = array.unsafe_buffer_pointer(), c_void_p(), c_size_t()
        handle = IpcMemHandle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_void_p(at))
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return [base64.b64encode(bytes(handle.reserved)).decode(), at - (base.value or 0)]

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise EngineError(
                f"{name} failed with CUDA error {status}. Memory can be shared where trainer and "
                "vLLM use one GPU and XLA_PYTHON_CLIENT_ALLOCATOR is not cuda_async; try "
                "--set rollout.vllm.transport=files."
            )


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            "rollout.vllm.transport=ipc needs an NVIDIA GPU and its driver (libcuda.so.1), which "
            "is not to be found here. Try --set rollout.vllm.transport=files."
        ) from error
