# SPDX-License-Identifier: Apache-2.0
"""What a stage of the campaign uses: figures for its record, and the device alone or shared.

A stage is a process. It compiles at any time, beside the other stages, and asks for the device only
while it runs: alone to measure, shared to compare numbers. Next: campaign.py, which starts stages.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "figures "  # begins a line of output that is for the record; libraries print to it too
LOCK_FOLDER = "ON_DEVICE_LOCKS"  # environment variable; without it there are no other stages


def report(**figures: Any) -> None:
    """Print figures for the stage's record, one JSON line."""
    print(MARK + json.dumps(figures), flush=True)


@contextlib.contextmanager
def device_alone() -> Iterator[None]:
    """Wait until no other stage uses the device, and keep them off it."""
    with _hold_lock(fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def device_shared() -> Iterator[None]:
    """Use the device beside other stages that share it, while none has it alone."""
    with _hold_lock(fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _hold_lock(kind: int) -> Iterator[None]:
    folder = os.environ.get(LOCK_FOLDER)
    if not folder:
        yield
        return
    # The kernel releases the locks of a process that dies.
    with Path(folder, "device").open("a") as device, Path(folder, "gate").open("a") as gate:
        # Whoever waits for the device holds the gate, or those who share it would come and go
        # without an end while one waits to have it alone.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(device, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
