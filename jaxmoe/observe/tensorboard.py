# SPDX-License-Identifier: Apache-2.0
"""Scalars for TensorBoard, written in the caller's thread.

tensorboardX's own SummaryWriter hands events to a thread through a queue of ten. When that thread
ends by an error (a full disk, a clock that goes back), the queue fills and the training waits for
ever. Its records are written here one after the other instead, a step in one write.
Next: jaxmoe/observe/metrics.py writes to it.
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

from jaxmoe.run_files import append, make_folder, new_file

# protobuf makes the classes as it is imported
Event: Any = vars(event_pb2)["Event"]
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]
_VERSION = "brain.Event:2"
_SECOND = re.compile(r"events\.out\.tfevents\.(\d{10})\.", re.ASCII)


class EventFile:
    """One event file in a folder. TensorBoard reads all of the folder's in the order of names."""

    def __init__(self, folder: Path, *, suffix: str, purge_step: int | None = None) -> None:
        """With `purge_step` TensorBoard hides what earlier files hold from that step on.

        Raises RunFolderError where the disk does not take the file.
        """
        make_folder(folder)
        self._file = new_file(_unused(folder, suffix))
        self._write(Event(wall_time=time.time(), file_version=_VERSION))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """All of a step. Raises RunFolderError; what follows could then not be read."""
        values = [scalar(name, value).value[0] for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        """A record: length, its checksum, the event, its checksum."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
        append(self._file, length + next(sums) + content + next(sums))


def _unused(folder: Path, suffix: str) -> Path:
    """A name behind those of all earlier files, also where the clock went back since."""
    names = (_SECOND.match(path.name) for path in folder.iterdir())
    second = max(int(time.time()), *(int(name[1]) + 1 for name in names if name), 0)
    return folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}{suffix}"
