# SPDX-License-Identifier: Apache-2.0
"""Many processes that run one program: how they meet, and what they must agree on.

Each process runs the whole loop on its own devices and sees the same numbers; what is made on a
host (rewards, signals) is shared out or agreed on here. Every function is a collective: all
processes call it, in the same order. With one process all of this is nothing.
Next: jaxmoe/train.py.
"""

import ipaddress
import os
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
from jaxmoe.parallel.channel import Channel
from jaxmoe.shapes import Leaf

Item = TypeVar("Item")

WAIT_S = 60  # for the others at the start
HEARTBEAT_S = 20  # a process that is silent for so long is dead, and ends the others
FIND = "JAXMOE_PROCESSES"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(environ: Mapping[str, str] = os.environ) -> None:
    """Meet the other processes of this run, if the environment tells of any; before any device.

    By the three variables in PLAIN, which the scripts of launch/ set; or, with FIND=auto, by what
    jax finds on a TPU pod.
    Raises ConfigError where the variables are wrong or the first process does not answer.
    """
    if jax.distributed.is_initialized():
        return
    options: dict[str, Any] = {}
    if any(name in environ for name in PLAIN):
        address, count, number = _plain(environ)
        if count == 1:
            return
        if number > 0:
            _answers(address)
        options = {
            "coordinator_address": address, "num_processes": count, "process_id": number,
            # or jax would look at SLURM's variables and take one GPU of a node's
            "cluster_detection_method": "deactivate",
        }  # fmt: skip
        if _only_here(address) and BIND not in environ:  # jax would listen on every network
            options["coordinator_bind_address"] = address
    elif environ.get(FIND) != "auto":
        return
    try:
        jax.distributed.initialize(
            **options, initialization_timeout=WAIT_S, heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=HEARTBEAT_S,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of a run must find each other; {str(error).splitlines()[0][:200]}. "
            f"Try {' '.join(f'{name}=...' for name in PLAIN)} for each of them."
        ) from error


def by_one_process(command: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where the environment tells of several, each of which would do it all."""
    require(
        environ.get(PLAIN[1], "1") == "1" and environ.get(FIND) != "auto",
        f"python -m jaxmoe.{command} must be one process's; the environment tells of several "
        f"({PLAIN[1]}={environ.get(PLAIN[1], '')}, {FIND}={environ.get(FIND, '')}). "
        f"Try env -u {PLAIN[1]} -u {FIND} before the command.",
    )


def _plain(environ: Mapping[str, str]) -> tuple[str, int, int]:
    missing = [name for name in PLAIN if name not in environ]
    address, count, number = (environ.get(name, "") for name in PLAIN)
    host, _, port = address.rpartition(":")
    if missing or not (host and port.isdecimal() and count.isdecimal() and number.isdecimal()):
        raise ConfigError(
            "many processes need host:port of the first, how many they are, and a number each; "
            f"got {', '.join(f'{name}={environ.get(name, chr(0))!r}' for name in PLAIN)}. "
            "Try JAX_COORDINATOR_ADDRESS=127.0.0.1:8476 JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=0."
            .replace(repr(chr(0)), "nothing")
        )  # fmt: skip
    if int(number) >= int(count):
        raise ConfigError(
            f"JAX_PROCESS_ID ({number}) must be below JAX_NUM_PROCESSES ({count}). Number the "
            "processes from 0."
        )
    return address, int(count), int(number)


def _only_here(address: str) -> bool:
    """True for a loopback address written as a number; a name is not looked up."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _answers(address: str) -> None:
    """Raises ConfigError unless something listens there within WAIT_S: jax would end the process
    without a word to its user."""
    host, _, port = address.rpartition(":")
    until, why = time.monotonic() + WAIT_S, ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except OSError as error:
            why = str(error)
        time.sleep(0.5)
    raise ConfigError(
        f"the first process of the run must listen at {address}; nothing answered for {WAIT_S} s "
        f"({why}). Start process 0, or mend JAX_COORDINATOR_ADDRESS."
    )


def same_everywhere(**texts: str) -> None:
    """Raises ConfigError where a text differs between processes, naming it and who has another."""
    for name, told in _columns(everyones(texts)).items():
        others = [i for i, text in enumerate(told) if text != told[0]]
        if others:
            raise ConfigError(
                f"{name} must be the same in all processes; other than in process 0 it is in "
                f"{', '.join(map(str, others))}: {_differs(told[0], told[others[0]])}. Start all "
                "with one command and one version of the code."
            )


def _columns(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _differs(a: str, b: str) -> str:
    """The first lines that differ."""
    for x, y in zip([*a.splitlines(), ""], [*b.splitlines(), ""], strict=False):
        if x != y:
            return f"{y.strip()[:80]!r} and not {x.strip()[:80]!r}"
    return f"{b[:80]!r} and not {a[:80]!r}"


def everyones(value: Any) -> list[Any]:
    """What each process has, by its number: JSON values.

    Opens no device, since a check of kernels comes first, and waits as long as the others live.
    """
    return _channel().everyones(value) if jax.distributed.is_initialized() else [value]


@cache  # it counts what was said
def _channel() -> Channel:
    return Channel("processes")


def in_shares(
    items: Sequence[Item], fn: Callable[[Sequence[Item]], Any], *, of: int = 1
) -> list[Any]:
    """fn(share) of each process, by its number; `of` neighbours stay together.

    Raises in all processes what one raised: ConfigError, or EngineError for anything else.
    """
    count, number = jax.process_count(), jax.process_index()
    if count == 1:
        return [fn(items)]
    groups = -(-len(items) // of)
    first, last = (groups * i // count * of for i in (number, number + 1))
    return _channel().by_all(lambda: fn(items[first:last]))


@contextmanager
def together() -> Iterator[None]:
    """Inside, `join`ed processes run; where one is lost the others end with one line.

    Raises EngineError for a collective that failed. A process whose heartbeat is missed for
    HEARTBEAT_S is named by jax itself, which then ends the others.
    """
    join()
    try:
        with first_speaks():
            yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise EngineError(
            f"process {jax.process_index()} of {jax.process_count()} lost another one: "
            f"{(str(error).splitlines() or [''])[0][:200]}. Look for the first error in the logs "
            "of all; the same command resumes from the last checkpoint."
        ) from error


def leave(code: int) -> int:
    """The exit status; a process that failed goes at once, or the others would wait for it."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def first_speaks() -> Iterator[None]:
    """Of all processes the first alone writes to the terminal; errors are everybody's."""
    if not jax.distributed.is_initialized() or _channel().number == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def agreed(flag: int) -> int:
    """The largest of all processes' flags."""
    if jax.process_count() == 1:
        return flag
    return int(np.max(multihost_utils.process_allgather(np.int32(flag))))


def on_hosts(x: Leaf) -> np.ndarray:
    """An array whole in the memory of every process."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
