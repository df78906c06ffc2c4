# SPDX-License-Identifier: Apache-2.0
"""GPU to GPU: vLLM's own NCCL and CUDA IPC engines, with our loading and checks.

How tensors travel stays vLLM's; `update_info` carries the update's manifest beside what vLLM asks
for, and one call of update_weights brings a whole update.
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

from jaxmoe.vllm_plugin import manifest
from jaxmoe.vllm_plugin.ipc_memory import opened
from jaxmoe.vllm_plugin.loaded_state import LoadedState
from jaxmoe.vllm_plugin.loading import Take
from jaxmoe.vllm_plugin.manifest import Manifest
from jaxmoe.vllm_plugin.transfer import VerifiedTransfer

_TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass
class NcclUpdateInfo(NCCLWeightTransferUpdateInfo):
    """names, dtype_names, shapes of what is broadcast, in that order, and the manifest."""

    manifest: dict[str, Any] = field(default_factory=dict)


@dataclass
class IpcUpdateInfo(IPCWeightTransferUpdateInfo):
    """names, dtype_names, shapes and handles of what is shared, and the manifest."""

    ipc_handles: list[dict[str, Any]] | dict[str, Any] | None = None  # JSON knows no tuples
    manifest: dict[str, Any] = field(default_factory=dict)


class _Taker:
    """What stands in the model's place while tensors arrive; vLLM 0.33 keeps things by it."""

    load_weights: Take


class DirectTransfer(VerifiedTransfer):
    """What the two have in common."""

    _taker: _Taker

    def start_weight_update(self) -> None:
        """Nothing yet: an update that is rejected must leave the model as it is."""

    def receive(self, info: Any, arrive: Callable[[Any], None]) -> None:
        """Have vLLM's engine `arrive` hand its tensors to us instead of the model.

        Raises UpdateRejected before any tensor moves where those announced are not the manifest's.
        """
        expected = manifest.parse(info.manifest, "update_info.manifest")
        self.check(expected)
        manifest.reject(expected.label, _unlike(expected, info))
        model = self.model
        with self.receiving(expected) as take:
            self._taker.load_weights = take
            self.model = self._taker
            try:
                arrive(info)
            finally:
                self.model = model


class NcclTransfer(DirectTransfer, NCCLWeightTransferEngine):
    """Backend "jaxmoe_nccl": broadcasts from the trainer."""

    update_info_cls = NcclUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loaded_state, self._taker = LoadedState(), _Taker()

    def receive_weights(self, update_info: NcclUpdateInfo) -> None:
        self.receive(update_info, super().receive_weights)

    def finish_weight_update(self) -> None:
        """Nothing left: the model is whole again as soon as an update is received."""


class IpcTransfer(DirectTransfer, IPCWeightTransferEngine):
    """Backend "jaxmoe_ipc": memory of a GPU that trainer and vLLM share."""

    update_info_cls = IpcUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loaded_state, self._taker = LoadedState(), _Taker()

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        """Handles of our trainer are [handle, offset]; torch's own, longer ones vLLM opens."""
        handles = update_info.ipc_handles
        ours = isinstance(handles, list) and all(len(p) == 2 for by in handles for p in by.values())
        with ExitStack() as memory:  # the trainer's: let go whatever comes of it
            take = partial(self._open, memory)
            self.receive(update_info, take if ours else super().receive_weights)

    def _open(self, memory: ExitStack, info: IpcUpdateInfo) -> None:
        gpu = torch.cuda.get_device_properties(self.device.index).uuid
        shared = memory.enter_context(opened(info, str(gpu)))
        memory.callback(torch.accelerator.synchronize)  # first: it may still be read
        self.model.load_weights(shared)

    def finish_weight_update(self) -> None:
        """Let go of what vLLM's own importer holds."""
        self._packed_importer.close()


def _unlike(expected: Manifest, info: Any) -> list[str]:
    """What is announced and is not the manifest's."""
    said = dict(zip(info.names, zip(info.dtype_names, info.shapes, strict=True), strict=True))
    problems = [f"{name} is not announced" for name in expected.tensors if name not in said]
    for name, (dtype, shape) in said.items():
        tensor = expected.tensors.get(name)
        if tensor is None:
            problems.append(f"{name} is announced and not in the manifest")
        elif (dtype, tuple(shape)) != (_TORCH[tensor.dtype], tensor.shape):
            problems.append(
                f"{name} must be {_TORCH[tensor.dtype]} {list(tensor.shape)} by the manifest, "
                f"{dtype} {list(shape)} is announced"
            )
    return problems
