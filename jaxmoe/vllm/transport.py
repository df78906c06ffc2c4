# SPDX-License-Identifier: Apache-2.0
"""How weights get to one vLLM: files, shared (in this process), nccl or ipc.

Files are written once for all servers and stay until the next version, so that a server that died
can be given them again; the others need the trainer's weights at hand.
nccl and ipc HAVE NOT RUN ON A GPU. Next: jaxmoe/weight_sync/update.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.vllm.backend import Backend, Unanswered
from jaxmoe.vllm_plugin import tensor_mailbox
from jaxmoe.weight_sync.cuda_ipc import handles
from jaxmoe.weight_sync.in_process import shared
from jaxmoe.weight_sync.nccl import Group, broadcast
from jaxmoe.weight_sync.update import WeightUpdate


class Channel:
    """The way to one vLLM."""

    def __init__(self, way: str) -> None:
        self.way = way
        self._group: Group | None = None

    def open(self, backend: Backend) -> None:
        """Set vLLM's end up; again after it was restarted."""
        self.close()
        if self.way != "nccl":
            return backend.init_transfer({})
        self._group = group = Group(len(backend.held()))
        with beside(group.join):
            backend.init_transfer(group.init_info)

    def make(
        self, params: Params, cfg: ModelConfig, *, dtype: str, run: str, version: int
    ) -> WeightUpdate:
        """A publication for this vLLM alone; not for files, which all share."""
        named: dict[str, Any] = dict(dtype=dtype, run=run, version=version)
        if self.way == "nccl":
            assert self._group is not None, "opened before it is used"
            return broadcast(self._group, params, cfg, **named)
        if self.way == "ipc":
            return handles(params, cfg, **named)
        return shared(params, cfg, **named, mailbox=tensor_mailbox)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


@contextmanager
def beside(fn: Callable[[], None]) -> Iterator[None]:
    """Run fn in a thread beside the block; its error is told, and is the reason of the block's."""
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
        raise Unanswered(f"sending weights failed: {errors[0]}; {error}") from errors[0]
    if errors:
        raise Unanswered(f"sending weights failed: {errors[0]}") from errors[0]
