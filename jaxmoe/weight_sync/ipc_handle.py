# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver's handle of an allocation, as both sides of CUDA IPC pass it; ctypes alone.

Next: jaxmoe/weight_sync/cuda_ipc.py makes handles, jaxmoe/vllm/plugin/ipc_memory.py opens
them.
"""

import ctypes


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle, an opaque structure passed by value; also large enough for a CUuuid."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]
