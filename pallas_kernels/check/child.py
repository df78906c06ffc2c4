# SPDX-License-Identifier: Apache-2.0
"""Run a check in a child process, since a wrong kernel may hang at a barrier or crash the process.

Next: verdicts.py, which stores the verdicts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.check.verdicts import KernelVerdict

# Includes compiling for the chip, which may take minutes.
TIMEOUT_S = 600.0
CHIP_TIMEOUT_S = 120.0
POLL_S = 0.2  # so soon a child that is not wanted any more is killed
_START = (  # the alarm ends a hanging child whose parent is dead
    "import json, signal, sys; signal.alarm(int(sys.argv[3])); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from pallas_kernels.check.one import main; main(sys.argv[2])"
)
_FAULT_MAY_BE_OF_MACHINE = ("it raised ", "the process ")  # begins a fault that no number shows
_MARK = "kernel check: "  # that of one.py, which is not imported here because it imports JAX


class ChildReport(NamedTuple):
    """A child's messages, and how it ended: "" for a normal end."""

    lines: tuple[dict[str, Any], ...]
    end: str


class NoChip(Exception):
    """The device could not be opened by the child process, so there is no verdict."""


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a check: without autotuning of XLA's matrix products on a GPU.

    Pallas' kernels are not tuned. The reference has many products, and its speed does not matter.
    """
    flags = environ.get("XLA_FLAGS", "")
    if "--xla_gpu_autotune_level" not in flags:
        flags = f"{flags} --xla_gpu_autotune_level=0".strip()
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**environ, **settings, "XLA_FLAGS": flags}


def run_child(
    request: Mapping[str, Any], timeout_s: float, stop: threading.Event | None = None
) -> ChildReport:
    """Run one.py on the request, and kill it after `timeout_s` or when `stop` is set."""
    path, request_json, alarm = json.dumps(sys.path), json.dumps(dict(request)), int(timeout_s) + 10
    command = [sys.executable, "-c", _START, path, request_json, str(alarm)]
    with tempfile.TemporaryDirectory() as folder:  # files: a pipe may stay open in grandchildren
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=child_environ(os.environ),
                start_new_session=True,
            )
            try:
                status = child.wait(timeout_s) if stop is None else _wait(child, timeout_s, stop)
                end = "" if status == 0 else _describe_exit(status)
            except subprocess.TimeoutExpired:
                end = f"gave no result in {timeout_s:g} s"
            finally:
                if child.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        # The group and not the process: compilers that the child started would go
                        # on.
                        os.killpg(child.pid, signal.SIGKILL)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(10)  # a driver may keep it alive; then it is abandoned
        messages = [
            x.removeprefix(_MARK) for x in _read_text(out).splitlines() if x.startswith(_MARK)
        ]
        if end and last_line(_read_text(err)):
            end += f" ({last_line(_read_text(err))})"
    return ChildReport(tuple(json.loads(x) for x in messages), end)


def _wait(child: subprocess.Popen[bytes], timeout_s: float, stop: threading.Event) -> int:
    """The child's exit status. Raises TimeoutExpired after `timeout_s` or when `stop` is set."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if stop.is_set() or time.monotonic() > deadline:
                raise


def find_chip() -> dict[str, str]:
    """Return platform, kind, driver and jax version of this machine's device.

    Raises: NoChip when the child process reports nothing.
    """
    report = run_child({}, CHIP_TIMEOUT_S)
    if not report.lines:
        raise NoChip(f"a process that opens the device {report.end or 'said nothing'}")
    return report.lines[0]["chip"]


def check_kernel(
    operation: str,
    impl: str,
    dtype: str,
    real: Sequence[Mapping[str, Any]] | None,
    timeout_s: float,
    stop: threading.Event | None = None,
) -> KernelVerdict:
    """Check one implementation of one operation.

    `real` has the fields of cases of the run's own sizes, which are compared in sampled rows. A
    check that `stop` ends has no meaning.
    Raises: NoChip when the machine, not the kernel, prevented the check.
    """
    report = run_child(
        {
            "operation": operation,
            "impl": impl,
            "dtype": dtype,
            "real": real and list(map(dict, real)),
        },
        timeout_s,
        stop,
    )
    if not report.lines:
        raise NoChip(f"a process that opens the device {report.end or 'said nothing'}")
    begin_messages = [x["begin"] for x in report.lines if "begin" in x]
    current_case = begin_messages[-1] if begin_messages else "start"
    unable = next((x["unable"] for x in report.lines if "unable" in x), None)
    if unable is not None:
        raise NoChip(f"the process ran out of memory in case {current_case} ({unable})")
    failure = next((x for x in report.lines if x.get("fault")), None)
    if failure is not None:
        return KernelVerdict("wrong", f"case {failure['case']}: {failure['fault']}")
    if report.end:
        return KernelVerdict("wrong", f"case {current_case}: the process {report.end}")
    cases = [x for x in report.lines if "case" in x]
    refused_cases = [x for x in cases if x["refused"]]
    refused_run_cases = [x for x in refused_cases if x["own"]]  # the run needs these shapes
    if refused_run_cases or (refused_cases and len(refused_cases) == len(cases)):
        return KernelVerdict("refuses", (refused_run_cases or refused_cases)[-1]["refused"])
    return KernelVerdict("right", f"{len(cases) - len(refused_cases)} cases")


def may_be_of_machine(verdict: KernelVerdict) -> bool:
    """True if the check ended without a wrong number, as it does for want of memory or time."""
    fault = verdict.reason.partition(": ")[2]
    return verdict.kind == "wrong" and fault.startswith(_FAULT_MAY_BE_OF_MACHINE)


def last_line(text: str) -> str:
    """The last line that is not blank, at most 200 characters."""
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    return lines[-1][:200] if lines else ""


def _describe_exit(status: int) -> str:
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace")
