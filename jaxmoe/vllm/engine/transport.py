# SPDX-License-Identifier: Apache-2.0
"""Transports of new weights to one vLLM replica: files, in_process, nccl or ipc.

Files are written once for all servers and stay until the next version, so that a restarted server
can load them again; the others need the trainer's current weights. nccl and ipc are not yet tested
on GPU. Next: jaxmoe/weight_sync/update.py.
"""

from typing import Any

from jaxmoe.config import ModelConfig
from jaxmoe.http_engine.send_thread import run_concurrently
from jaxmoe.shapes import Params
from jaxmoe.vllm.client.routes import VllmRoutes
from jaxmoe.vllm.plugin import tensor_mailbox
from jaxmoe.weight_sync.cuda_ipc import share_ipc_handles
from jaxmoe.weight_sync.dlpack import share_in_process
from jaxmoe.weight_sync.nccl import NcclGroup, broadcast_weights
from jaxmoe.weight_sync.sent_tensors import Experts
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate


class Transport:
    """The transport to one replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._group: NcclGroup | None = None

    @property
    def breaks_on_failure(self) -> bool:
        """True for a broadcast, which may still run: the next update needs another connection."""
        return self.name == "nccl"

    def connect(self, backend: VllmRoutes) -> None:
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
