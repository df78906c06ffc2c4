# SPDX-License-Identifier: Apache-2.0
"""What the system knows of a server's processes: which there are, whether they work, what they map.

By /proc; where there is none (macOS) nothing is known, and nothing is done.
Next: jaxmoe/vllm/heartbeat.py.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/dev/shm")
_OURS = ("psm_", "vllm", "torch_", "nccl-")  # what Python, vLLM, torch and NCCL call theirs
_PROC = Path("/proc")


@dataclass(frozen=True)
class CpuTime:
    """Seconds of CPU so far of each worker, or of all together; whether one waits for a disk."""

    cpu_s: dict[int, float]
    on_disk: bool

    def still_since(self, before: "CpuTime", cpu_s: float) -> bool:
        """Whether one that the others wait for did less than cpu_s meanwhile."""
        used = [after - before.cpu_s.get(pid, 0.0) for pid, after in self.cpu_s.items()]
        return not self.on_disk and min(used) < cpu_s


def members(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    return [pid for pid, _, fields in _stats() if int(fields[2]) == group]


def work(group: int) -> CpuTime | None:
    """What a group has done; None where the system does not tell.

    A worker that stands still counts alone: others turn in circles while they wait for it.
    """
    mine = [found for found in _stats() if int(found[2][2]) == group]
    if not mine:
        return None
    second = os.sysconf("SC_CLK_TCK")
    each = {pid: (int(f[11]) + int(f[12])) / second for pid, _, f in mine}
    workers = {pid: each[pid] for pid, name, _ in mine if name.startswith("VLLM::Worker")}
    return CpuTime(workers or {group: sum(each.values())}, any(f[0] == "D" for _, _, f in mine))


def segments(group: int) -> set[Path]:
    """Files of shared memory that its processes have mapped and that vLLM made.

    Whoever is killed leaves them: up to 0.4 GB of memory a server that nobody can use or free.
    """
    found = set[Path]()
    for pid in members(group):
        with suppress(OSError):
            for line in (_PROC / str(pid) / "maps").read_text().splitlines():
                path = Path(line.partition("/")[2] and "/" + line.partition("/")[2])
                if path.parent == MEMORY and path.name.startswith(_OURS):
                    found.add(path)
    return found


def remove(found: set[Path]) -> None:
    """Those segments that are still there and ours."""
    for path in found:
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                path.unlink()


def _stats() -> list[tuple[int, str, list[str]]]:
    """(process, its name, the fields of its stat from the state on) of all that run."""
    found = []
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] not in "ZX":
                found.append((int(entry.name), name, rest.split()))
    return found
