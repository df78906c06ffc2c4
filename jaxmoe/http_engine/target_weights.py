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
    # Writes a file with all weights of this version, if `file` has only the changes.
    write_complete: Callable[[], WeightFile | None] | None = None

    def send_complete(self, failed: WeightFile | None) -> bool:
        """Send all weights from now on, if the file that failed has only changes."""
        if self.write_complete is None or failed is None or not failed.update_info.get("changes"):
            return False
        # Several servers may fail at once, which then get one file.
        complete = self.write_complete()
        self.file = complete or self.file
        return complete is not None
