# SPDX-License-Identifier: Apache-2.0
"""Scalars for TensorBoard, written in the caller's thread.

tensorboardX's SummaryWriter passes events to a thread through a queue of ten. If that thread
fails (a full disk, a clock that is set back), the queue fills up and training blocks forever. This
module writes the same records directly, each step in one write.
Next: jaxmoe/observe/metrics.py uses it.
"""

import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from jaxmoe.run_files import append_bytes, make_folder, new_file

# protobuf creates these classes at import, so a type checker does not see them.
Event: Any = vars(event_pb2)["Event"]
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]
_VERSION = "brain.Event:2"
_SECOND = re.compile(r"events\.out\.tfevents\.(\d{10})\.", re.ASCII)


class EventFile:
    """One event file of a folder. TensorBoard reads all files of a folder in the order of names."""

    def __init__(self, folder: Path, *, suffix: str, purge_step: int | None = None) -> None:
        """Create the file.

        purge_step: TensorBoard hides the events of earlier files from this step on.
        Raises: RunFolderError if the file cannot be created.
        """
        make_folder(folder)
        self._file = new_file(_new_event_path(folder, suffix))
        self._write_event(Event(wall_time=time.time(), file_version=_VERSION))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write_event(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step.

        Raises: RunFolderError. Stop writing then: TensorBoard could not read later records.
        """
        values = [scalar(name, value).value[0] for name, value in metrics.items()]
        self._write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _write_event(self, event: Any) -> None:
        """Write a record: length, checksum of the length, event, checksum of the event."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
        append_bytes(self._file, length + next(sums) + content + next(sums))


def _new_event_path(folder: Path, suffix: str) -> Path:
    """A file name that sorts after all existing ones, even if the clock was set back."""
    names = (_SECOND.match(path.name) for path in folder.iterdir())
    second = max(int(time.time()), *(int(name[1]) + 1 for name in names if name), 0)
    return folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}{suffix}"
