# SPDX-License-Identifier: Apache-2.0
"""State, threads and parent of a process, as the kernel reports them.

Next: jaxmoe/sandbox/process.py asks it of the process of a sandbox.
"""


def read_state(pid: int) -> tuple[str, int]:
    """The state of a process, such as "R" for running, and its threads; ("", 0) without one."""
    fields = _read_fields(pid)
    return (fields[0], int(fields[17])) if fields else ("", 0)


def read_parent(pid: int) -> int:
    """The parent of a process; 0 if there is no such process."""
    fields = _read_fields(pid)
    return int(fields[1]) if fields else 0


def _read_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, as in proc(5); [] without a process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
