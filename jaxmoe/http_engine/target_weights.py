# SPDX-License-Identifier: Apache-2.0
"""The weights that every server must hold, and how they are sent to one.

Next: jaxmoe/http_engine/replica.py sends them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxmoe.http_engine.backend import Backend
from jaxmoe.http_engine.probe import Logps, ProbeReference
from jaxmoe.weight_sync.files import WeightFile
from jaxmoe.weight_sync.update import WeightUpdate


@runtime_checkable
class WeightSender(Protocol):
    """The trainer's end of the transport of weights to one server."""

    @property
    def breaks_on_failure(self) -> bool: ...  # a failed update needs another connection

    def connect(self, backend: Any) -> None:
        """Prepare the server for updates; called again after its restart."""
        ...

    def close(self) -> None: ...


class FileSender:
    """Weights in files, which need no connection."""

    breaks_on_failure = False

    def connect(self, backend: Backend) -> None:
        """Prepare nothing."""

    def close(self) -> None:
        """End nothing."""


@dataclass
class TargetWeights:
    """The version that every replica must hold."""

    label: str
    version: int
    file: WeightFile | None  # one for all replicas, or
    # An update for one replica, by its sender, while the trainer has the weights.
    build_update: Callable[[Any], WeightUpdate] | None
    logps: Logps | None  # while the trainer has the weights
    probe_reference: ProbeReference | None = None  # afterwards
