# SPDX-License-Identifier: Apache-2.0
"""How new weights reach one vLLM replica: files, in_process, nccl or ipc.

Files are written once for all servers and stay until the next version, so that a server that died
can be given them again; the others need the trainer's weights at hand.
nccl and ipc are not yet tested on GPU. Next: jaxmoe/weight_sync/update.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm_plugin import tensor_mailbox
from jaxmoe.weight_sync.cuda_ipc import share_ipc_handles
from jaxmoe.weight_sync.in_process import share_in_process
from jaxmoe.weight_sync.nccl import NcclGroup, broadcast
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate


class Transport:
    """The transport to one replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._group: NcclGroup | None = None

    def open(self, backend: Backend) -> None:
        """Set vLLM's end up; again after it was restarted."""
        self.close()
        if self.name != "nccl":
            return backend.init_transfer({})
        self._group = group = NcclGroup(len(backend.loaded_state()))
        with concurrently(group.join):
            backend.init_transfer(group.init_info)

    def make(
        self, params: Params, cfg: ModelConfig, manifest: ManifestDict, *, dtype: str, run: str,
        version: int,
    ) -> WeightUpdate:  # fmt: skip
        """A weight update for this replica alone; not for files, which all share."""
        named: dict[str, Any] = dict(dtype=dtype, run=run, version=version, manifest=manifest)
        if self.name == "nccl":
            assert self._group is not None, "opened before it is used"
            return broadcast(self._group, params, cfg, **named)
        if self.name == "ipc":
            return share_ipc_handles(params, cfg, **named)
        return share_in_process(params, cfg, **named, mailbox=tensor_mailbox)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


@contextmanager
def concurrently(fn: Callable[[], None]) -> Iterator[None]:
    """Run fn in a thread beside the block; its error is raised, as the cause of the block's own."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fn()
        except BaseException as error:  # raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="jaxmoe-send", daemon=True)
    thread.start()
    try:
        yield
        thread.join()
    except Exception as error:
        if not errors:
            raise
        raise RequestFailed(f"sending weights failed: {errors[0]}; {error}") from errors[0]
    if errors:
        raise RequestFailed(f"sending weights failed: {errors[0]}") from errors[0]
