# SPDX-License-Identifier: Apache-2.0
"""The driver's handle of an allocation, as both sides of CUDA IPC pass it; ctypes alone.

Next: jaxmoe/weight_sync/cuda_ipc.py makes handles, jaxmoe/vllm_plugin/ipc_memory.py opens them.
"""

import ctypes


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value; with room to spare CUuuid. Bytes without meaning to us."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]
