# SPDX-License-Identifier: Apache-2.0
"""Transports of new weights to one vLLM replica: files, in_process, nccl or ipc.

Files are written once for all servers and stay until the next version, so that a restarted server
can load them again; the others need the trainer's current weights. nccl and ipc are not yet tested
on GPU. Next: jaxmoe/vllm/weight_sync/update.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.vllm.client.backend import Backend, RequestFailed
from jaxmoe.vllm.plugin import tensor_mailbox
from jaxmoe.vllm.weight_sync.cuda_ipc import share_ipc_handles
from jaxmoe.vllm.weight_sync.dlpack import share_in_process
from jaxmoe.vllm.weight_sync.nccl import NcclGroup, broadcast_weights
from jaxmoe.vllm.weight_sync.sent_tensors import Experts
from jaxmoe.vllm.weight_sync.update import ManifestDict, WeightUpdate


class Transport:
    """The transport to one replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._group: NcclGroup | None = None

    def connect(self, backend: Backend) -> None:
        """Initialize vLLM's end; needed again after a restart."""
        self.close()
        if self.name != "nccl":
            return backend.init_transfer({})
        self._group = group = NcclGroup(len(backend.loaded_state()))
        with run_concurrently(group.join):
            backend.init_transfer(group.init_info)

    def build_update(
        self,
        params: Params,
        cfg: ModelConfig,
        manifest: ManifestDict,
        *,
        dtype: str,
        run: str,
        version: int,
        experts: Experts = "dense",
    ) -> WeightUpdate:
        """Return a weight update for this replica only; not for files, which all replicas share."""
        named: dict[str, Any] = dict(
            dtype=dtype, run=run, version=version, experts=experts, manifest=manifest
        )
        if self.name == "nccl":
            assert self._group is not None, "opened before it is used"
            return broadcast_weights(self._group, params, cfg, **named)
        if self.name == "ipc":
            return share_ipc_handles(params, cfg, **named)
        return share_in_process(params, cfg, **named, mailbox=tensor_mailbox)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


@contextmanager
def run_concurrently(fn: Callable[[], None]) -> Iterator[None]:
    """Run fn in a thread during the block; its error is raised, or causes the block's error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fn()
        except BaseException as error:  # raised again in the waiting thread
            errors.append(error)

    # A daemon, because a broadcast to ranks that are gone may never return.
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
