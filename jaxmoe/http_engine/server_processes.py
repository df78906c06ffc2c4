# SPDX-License-Identifier: Apache-2.0
"""Facts about a server's processes: which exist, whether they use CPU, what memory they map.

They are read from /proc; without it (macOS) nothing is known, and nothing is done. Next:
jaxmoe/http_engine/heartbeat.py.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY_DIR = Path("/dev/shm")
_SEGMENT_PREFIXES = ("psm_", "vllm", "torch_", "nccl-")  # of Python, vLLM, torch and NCCL
_PROC = Path("/proc")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds so far of each worker, or of the group; `on_disk`: a process waits for a disk."""

    cpu_s: dict[int, float]
    on_disk: bool

    def is_idle_since(self, before: "CpuTime", cpu_s: float) -> bool:
        """Return True if one of the processes used less than cpu_s since `before`."""
        used = [after - before.cpu_s.get(pid, 0.0) for pid, after in self.cpu_s.items()]
        return not self.on_disk and min(used) < cpu_s


def list_group_members(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    return [pid for pid, _, fields in _read_process_stats() if int(fields[2]) == group]


def measure_cpu_time(group: int) -> CpuTime | None:
    """Return the CPU time of a process group; None if the system does not provide it.

    Workers are measured separately: while one hangs, the others spin waiting for it.
    """
    stats = [stat for stat in _read_process_stats() if int(stat[2][2]) == group]
    if not stats:
        return None
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    seconds_by_pid = {pid: (int(f[11]) + int(f[12])) / ticks_per_second for pid, _, f in stats}
    workers = {
        pid: seconds_by_pid[pid] for pid, name, _ in stats if name.startswith("VLLM::Worker")
    }
    return CpuTime(
        workers or {group: sum(seconds_by_pid.values())}, any(f[0] == "D" for _, _, f in stats)
    )


def find_shared_memory(group: int) -> set[Path]:
    """Return the files of shared memory that vLLM made and the group's processes have mapped.

    Killed processes leave them behind: up to 0.4 GB per server that nobody can use or free.
    """
    segments = set[Path]()
    for pid in list_group_members(group):
        with suppress(OSError):
            for line in (_PROC / str(pid) / "maps").read_text().splitlines():
                path = Path(line.partition("/")[2] and "/" + line.partition("/")[2])
                if path.parent == SHARED_MEMORY_DIR and path.name.startswith(_SEGMENT_PREFIXES):
                    segments.add(path)
    return segments


def remove_shared_memory(segments: set[Path]) -> None:
    """Remove those segments that still exist and belong to this user."""
    for path in segments:
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                path.unlink()


def _read_process_stats() -> list[tuple[int, str, list[str]]]:
    """Return (process, its name, the fields of its stat from the state on) of all that run."""
    stats = []
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            # A process's name may contain spaces and parentheses; the fields begin after the last
            # one.
            name, _, fields = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            if fields.split()[0] not in "ZX":
                stats.append((int(entry.name), name, fields.split()))
    return stats
