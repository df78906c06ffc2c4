# SPDX-License-Identifier: Apache-2.0
"""A check in a process of its own: a barrier that nobody meets hangs, a bad address kills.

Next: verdicts.py, which keeps what came out.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.check.verdicts import KernelVerdict

TIMEOUT_S = 600.0  # compiling for the chip included
CHIP_TIMEOUT_S = 120.0
_START = (  # the alarm ends what hangs when its parent is no more
    "import json, signal, sys; signal.alarm(int(sys.argv[3])); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from pallas_kernels.check.one import main; main(sys.argv[2])"
)
_MARK = "kernel check: "  # as in one.py, which imports JAX


class Said(NamedTuple):
    """What a child told before it ended, and how it ended: "" where it came to its end."""

    lines: tuple[dict[str, Any], ...]
    end: str


class NoChip(Exception):
    """The device could not be opened, or not by a process of its own: nothing is known."""


def ask(request: Mapping[str, Any], timeout_s: float) -> Said:
    """Run one.py on the request; it is killed when its time is over."""
    environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    path, asked, alarm = json.dumps(sys.path), json.dumps(dict(request)), int(timeout_s) + 10
    command = [sys.executable, "-c", _START, path, asked, str(alarm)]
    with tempfile.TemporaryDirectory() as folder:  # a pipe could outlive the child in its children
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environ,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = child.wait(timeout_s)
                end = "" if status == 0 else _death(status)
            except subprocess.TimeoutExpired:
                end = f"gave no answer in {timeout_s:g} s"
            finally:
                if child.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(10)  # a driver may hold it; it is left alone then
        told = [x.removeprefix(_MARK) for x in _text(out).splitlines() if x.startswith(_MARK)]
        if end and status_line(_text(err)):
            end += f" ({status_line(_text(err))})"
    return Said(tuple(json.loads(x) for x in told), end)


def chip() -> dict[str, str]:
    """platform, kind, driver and jax of the device here. Raises NoChip where it is not told."""
    said = ask({}, CHIP_TIMEOUT_S)
    if not said.lines:
        raise NoChip(f"a process that opens the device {said.end or 'said nothing'}")
    return said.lines[0]["chip"]


def checked(
    operation: str, impl: str, dtype: str, real: Sequence[Mapping[str, Any]] | None,
    timeout_s: float,
) -> KernelVerdict:  # fmt: skip
    """The verdict on one operation in one implementation.

    `real` has the fields of cases of the run's own sizes, which are looked at in sampled rows.
    Raises NoChip where the machine and not the kernel stood in the way.
    """
    said = ask(
        {
            "operation": operation,
            "impl": impl,
            "dtype": dtype,
            "real": real and list(map(dict, real)),
        },
        timeout_s,
    )
    if not said.lines:
        raise NoChip(f"a process that opens the device {said.end or 'said nothing'}")
    begun = [x["begin"] for x in said.lines if "begin" in x]
    at = begun[-1] if begun else "the start"
    unable = next((x["unable"] for x in said.lines if "unable" in x), None)
    if unable is not None:
        raise NoChip(f"a process that checks it in {at} had no memory ({unable})")
    wrong = next((x for x in said.lines if x.get("fault")), None)
    if wrong is not None:
        return KernelVerdict("wrong", f"in {wrong['case']}: {wrong['fault']}")
    if said.end:
        return KernelVerdict("wrong", f"in {at}: it {said.end}")
    cases = [x for x in said.lines if "case" in x]
    refused = [x for x in cases if x["refused"]]
    own = [x for x in refused if x["own"]]  # the run's shapes must not be refused
    if own or (refused and len(refused) == len(cases)):
        return KernelVerdict("refuses", (own or refused)[-1]["refused"])
    return KernelVerdict("right", f"{len(cases) - len(refused)} cases")


def status_line(text: str) -> str:
    """The last line that says something, cut short."""
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    return lines[-1][:200] if lines else ""


def _death(status: int) -> str:
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
