# SPDX-License-Identifier: Apache-2.0
"""GPU-to-GPU transfer: vLLM's own NCCL and CUDA IPC engines, with our loading and checks.

vLLM's code moves the tensors. `update_info` carries the update's manifest in addition to vLLM's own
fields, and one call of update_weights brings a complete update.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from jaxmoe.vllm.plugin import manifest
from jaxmoe.vllm.plugin.ipc_memory import open_shared_tensors
from jaxmoe.vllm.plugin.loaded_state import LoadedState
from jaxmoe.vllm.plugin.loading import LoadTensors
from jaxmoe.vllm.plugin.manifest import Manifest
from jaxmoe.vllm.plugin.transfer import VerifiedTransfer

_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "U8": "uint8"}


@dataclass
class NcclUpdateInfo(NCCLWeightTransferUpdateInfo):
    """Names, dtype_names and shapes of the broadcast tensors, in order, and the manifest."""

    manifest: dict[str, Any] = field(default_factory=dict)


@dataclass
class IpcUpdateInfo(IPCWeightTransferUpdateInfo):
    """Names, dtype_names, shapes and handles of the shared tensors, and the manifest."""

    ipc_handles: list[dict[str, Any]] | dict[str, Any] | None = None  # JSON has no tuples
    manifest: dict[str, Any] = field(default_factory=dict)


class _LoadTarget:
    """Stand-in for the model while tensors arrive; vLLM 0.33 stores attributes on it."""

    load_weights: LoadTensors


class DirectTransfer(VerifiedTransfer):
    """The common part of both backends."""

    _taker: _LoadTarget

    def start_weight_update(self) -> None:
        """Do nothing: an update that is rejected must leave the model unchanged."""

    def receive_update(self, info: Any, receive: Callable[[Any], None]) -> None:
        """Have vLLM's engine `receive` pass its tensors to our loading instead of the model.

        Raises UpdateRejected, before any tensor moves, if the announced tensors differ from the
        manifest.
        """
        expected = manifest.parse_manifest(info.manifest, "update_info.manifest")
        self.check_model(expected)
        manifest.reject_problems(expected.label, _find_mismatches(expected, info))
        model = self.model
        with self.load_verified(expected) as load_tensors:
            self._taker.load_weights = load_tensors
            self.model = self._taker
            try:
                receive(info)
            finally:
                self.model = model


class NcclTransfer(DirectTransfer, NCCLWeightTransferEngine):
    """Backend "jaxmoe_nccl": broadcasts from the trainer."""

    update_info_cls = NcclUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loaded_state, self._taker = LoadedState(), _LoadTarget()

    def receive_weights(self, update_info: NcclUpdateInfo) -> None:
        self.receive_update(update_info, super().receive_weights)

    def finish_weight_update(self) -> None:
        """Do nothing: the model is complete as soon as an update has been received."""


class IpcTransfer(DirectTransfer, IPCWeightTransferEngine):
    """Backend "jaxmoe_ipc": memory of a GPU that trainer and vLLM share."""

    update_info_cls = IpcUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loaded_state, self._taker = LoadedState(), _LoadTarget()

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        """Receive handles of our trainer, [handle, offset], or torch's longer ones by vLLM."""
        handles = update_info.ipc_handles
        from_jaxmoe = isinstance(handles, list) and all(
            len(handle) == 2 for handles_by_gpu in handles for handle in handles_by_gpu.values()
        )
        with ExitStack() as memory:  # the trainer's memory: closed even after an error
            receive = partial(self._load_shared_memory, memory)
            self.receive_update(update_info, receive if from_jaxmoe else super().receive_weights)

    def _load_shared_memory(self, memory: ExitStack, info: IpcUpdateInfo) -> None:
        gpu = torch.cuda.get_device_properties(self.device.index).uuid
        shared = memory.enter_context(open_shared_tensors(info, str(gpu)))
        # This runs before the memory is closed, because kernels may still read it.
        memory.callback(torch.accelerator.synchronize)
        self.model.load_weights(shared)

    def finish_weight_update(self) -> None:
        """Release what vLLM's own importer holds."""
        self._packed_importer.close()


def _find_mismatches(expected: Manifest, info: Any) -> list[str]:
    """Return a message for each announced tensor that differs from the manifest."""
    announced = dict(zip(info.names, zip(info.dtype_names, info.shapes, strict=True), strict=True))
    problems = [f"{name} is not announced" for name in expected.tensors if name not in announced]
    for name, (dtype, shape) in announced.items():
        tensor = expected.tensors.get(name)
        if tensor is None:
            problems.append(f"{name} is announced and not in the manifest")
        elif (dtype, tuple(shape)) != (_TORCH_DTYPES[tensor.dtype], tensor.shape):
            problems.append(
                f"{name} must be {_TORCH_DTYPES[tensor.dtype]} {list(tensor.shape)} by the "
                f"manifest, {dtype} {list(shape)} is announced"
            )
    return problems
