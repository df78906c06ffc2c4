# SPDX-License-Identifier: Apache-2.0
"""Several processes that run one program: how they connect, and what they must agree on.

Each process runs the same loop on its own devices and sees the same numbers; work on hosts
(rewards, signals) is shared between them here. Every function is a collective: all processes call
it, in the same order. With a single process the functions do nothing or return their input.
Next: jaxmoe/train.py.
"""

import ipaddress
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmoe.config import ConfigError, EngineError, require
from jaxmoe.distributed.channel import Channel
from jaxmoe.distributed.roll_call import answering_roll_calls, find_lost_processes
from jaxmoe.shapes import Leaf

Item = TypeVar("Item")

START_TIMEOUT_S = 60  # for the other processes at the start
HEARTBEAT_TIMEOUT_S = 20  # a process that is silent this long counts as dead and ends the others
FIND_VARIABLE = "JAXMOE_PROCESSES"
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
# how the text of an error of XLA's runtime begins
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")
PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join_processes(environ: Mapping[str, str] = os.environ) -> None:
    """Connect to the other processes of this run, if the environment names any.

    This must precede any use of a device. The environment has the three variables in
    PROCESS_VARIABLES, which the scripts of launch/ set,
    or FIND_VARIABLE=auto for what jax finds on a TPU pod. Raises
    ConfigError if the variables are wrong or the first process does not answer.
    """
    if jax.distributed.is_initialized():
        return
    options: dict[str, Any] = {}
    if any(name in environ for name in PROCESS_VARIABLES):
        address, count, number = _read_variables(environ)
        if count == 1:
            return
        if number > 0:
            _wait_for_first_process(address)
        options = {
            "coordinator_address": address,
            "num_processes": count,
            "process_id": number,
            # jax would otherwise read SLURM's variables and use a single GPU of a node
            "cluster_detection_method": "deactivate",
        }
        # jax would listen on every network, and the coordinator has no authentication.
        if _is_loopback(address) and BIND_VARIABLE not in environ:
            options["coordinator_bind_address"] = address
    elif environ.get(FIND_VARIABLE) != "auto":
        return
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=START_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            "the processes of a run must connect to each other; "
            f"{str(error).splitlines()[0][:200]}. Try "
            f"{' '.join(f'{name}=...' for name in PROCESS_VARIABLES)} for each of them."
        ) from error


def names_several_processes(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the environment says that this process is one of several."""
    return environ.get(PROCESS_VARIABLES[1], "1") != "1" or environ.get(FIND_VARIABLE) == "auto"


def check_one_process(command: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the environment names several processes, which would repeat all the
    work."""
    require(
        not names_several_processes(environ),
        f"python -m jaxmoe.{command} must run as one process; the environment names several "
        f"({PROCESS_VARIABLES[1]}={environ.get(PROCESS_VARIABLES[1], '')}, "
        f"{FIND_VARIABLE}={environ.get(FIND_VARIABLE, '')}). Try env -u {PROCESS_VARIABLES[1]} -u "
        f"{FIND_VARIABLE} before the command.",
    )


def _read_variables(environ: Mapping[str, str]) -> tuple[str, int, int]:
    missing = [name for name in PROCESS_VARIABLES if name not in environ]
    address, count, number = (environ.get(name, "") for name in PROCESS_VARIABLES)
    host, _, port = address.rpartition(":")
    if missing or not (host and port.isdecimal() and count.isdecimal() and number.isdecimal()):
        values = (
            f"{name}={repr(environ[name]) if name in environ else 'nothing'}"
            for name in PROCESS_VARIABLES
        )
        raise ConfigError(
            "several processes need host:port of the first, their count, and a number each; "
            f"got {', '.join(values)}. Try JAX_COORDINATOR_ADDRESS=127.0.0.1:8476 "
            "JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=0."
        )
    if int(number) >= int(count):
        raise ConfigError(
            f"JAX_PROCESS_ID ({number}) must be below JAX_NUM_PROCESSES ({count}). Number the "
            "processes from 0."
        )
    return address, int(count), int(number)


def _is_loopback(address: str) -> bool:
    """Return True for a loopback address written as a number; a name is not looked up."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _wait_for_first_process(address: str) -> None:
    """Raise ConfigError unless something listens at `address` within START_TIMEOUT_S. jax would end
    the process without a message."""
    host, _, port = address.rpartition(":")
    deadline, reason = time.monotonic() + START_TIMEOUT_S, ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except OSError as error:
            reason = str(error)
        time.sleep(0.5)
    raise ConfigError(
        f"the first process of the run must listen at {address}; nothing answered for "
        f"{START_TIMEOUT_S} s ({reason}). Start process 0, or correct JAX_COORDINATOR_ADDRESS."
    )


def check_same_everywhere(**texts: str) -> None:
    """Raise ConfigError if a text differs between processes, naming the text and the processes."""
    for name, values in _texts_by_name(gather_from_processes(texts)).items():
        differing = [i for i, text in enumerate(values) if text != values[0]]
        if differing:
            raise ConfigError(
                f"{name} must be the same in all processes; it differs from process 0 in "
                f"{', '.join(map(str, differing))}: "
                f"{_format_difference(values[0], values[differing[0]])}. Start all with one "
                "command and one version of the code."
            )


def _texts_by_name(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _format_difference(a: str, b: str) -> str:
    """Return the first pair of lines that differ."""
    for x, y in zip([*a.splitlines(), ""], [*b.splitlines(), ""], strict=False):
        if x != y:
            return f"{y.strip()[:80]!r} and not {x.strip()[:80]!r}"
    return f"{b[:80]!r} and not {a[:80]!r}"


def gather_from_processes(value: Any) -> list[Any]:
    """Return the JSON values of all processes, by process number.

    Opens no device, since the check of kernels comes first, and waits as long as the others live.
    """
    return _open_channel().gather_values(value) if jax.distributed.is_initialized() else [value]


# One channel for the process: it counts its messages, and a second one would reuse their keys.
@cache
def _open_channel() -> Channel:
    return Channel("processes")


def map_shares(
    items: Sequence[Item], fn: Callable[[Sequence[Item]], Any], *, group_size: int = 1
) -> list[Any]:
    """Return fn(share) of each process, by process number; `group_size` neighbours stay together.

    An exception of one process is raised in all: ConfigError, or EngineError for any other.
    """
    count, number = jax.process_count(), jax.process_index()
    if count == 1:
        return [fn(items)]
    n_groups = -(-len(items) // group_size)
    first, last = (n_groups * i // count * group_size for i in (number, number + 1))
    return _open_channel().gather_results(lambda: fn(items[first:last]))


@contextmanager
def joined_processes() -> Iterator[None]:
    """Run the body with connected processes; if one is lost, the others end with a one-line error.

    Raises EngineError for a collective that failed, with the process that is gone. If a process
    misses its heartbeat for HEARTBEAT_TIMEOUT_S, or process 0 ends, jax itself names it and ends
    the others.
    """
    join_processes()
    with answering_roll_calls(), only_first_prints():
        try:
            yield
        except Exception as error:
            if is_failed_collective(error):
                raise lost_process_error(error) from error
            raise


def is_failed_collective(error: BaseException) -> bool:
    """True for an error of a collective in a run of several processes.

    jax raises it as a JaxRuntimeError, or as a ValueError with the same text where an array is
    read whose computation had failed.
    """
    if jax.process_count() == 1 or isinstance(error, ConfigError):
        return False
    is_status = isinstance(error, ValueError) and _STATUS.match(str(error)) is not None
    return is_status or isinstance(error, jax.errors.JaxRuntimeError)


def lost_process_error(error: BaseException) -> EngineError:
    """The error of a run that lost a process, with the number of that process."""
    number, count = jax.process_index(), jax.process_count()
    lost = find_lost_processes()
    reason = (str(error).splitlines() or [""])[0][:200]
    resume = "the same command resumes from the last checkpoint."
    if not lost:
        return EngineError(
            f"process {number} of {count} failed in a computation of all processes, and the others "
            f"live: {reason}. Look for the first error in the logs of all processes; {resume}"
        )
    names = f"process{'es' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
    return EngineError(
        f"process {number} of {count} lost the connection to {names}: {reason}. Look for the first "
        f"error in the log of {names} (a killed process writes none); {resume}"
    )


def exit_process(code: int) -> int:
    """Return the exit status; a failed process exits immediately, since the others would wait for
    it."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        # sys.exit would run jax's shutdown, which waits at a barrier for all processes.
        os._exit(code)
    return code


@contextmanager
def only_first_prints() -> Iterator[None]:
    """Write standard output only in the first process; errors are printed by all."""
    if not jax.distributed.is_initialized() or _open_channel().number == 0:
        yield
        return
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull):
        yield


def max_over_processes(flag: int) -> int:
    """Return the largest flag of all processes."""
    if jax.process_count() == 1:
        return flag
    return int(np.max(multihost_utils.process_allgather(np.int32(flag))))


def gather_to_hosts(x: Leaf) -> np.ndarray:
    """Return an array, unsharded, in the memory of every process."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
