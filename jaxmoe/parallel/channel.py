# SPDX-License-Identifier: Apache-2.0
"""What one process tells the others without a device: by the service they met at.

A collective of devices is no place to wait in: launch/env.sh has NCCL end it after five minutes.
Here a process waits as long as the others live, in any thread, since nothing is ordered against a
device's programs. It is for what a host makes: rollouts, digests, errors.
Next: jaxmoe/vllm/multi_process_engine.py.
"""

import json
from collections.abc import Callable
from typing import Any

from jax._src import distributed  # jax has no public name for the service

from jaxmoe.config import ConfigError, EngineError

PIECE_BYTES = 1 << 20  # of one message: gRPC takes 4 MiB at most
WAIT_MS = 24 * 3600 * 1000  # whose process dies ends all much sooner, by its heartbeat
_ERRORS = {kind.__name__: kind for kind in (EngineError, ConfigError)}


class Channel:
    """A name that all processes have for it; every method is called by all, in the same order."""

    def __init__(
        self, name: str, *, client: Any = None, number: int | None = None, count: int | None = None
    ) -> None:
        self._name, self._said = name, 0
        met = distributed.global_state  # and not jax.process_index(): that opens the device
        self.number = met.process_id if number is None else number
        self.count = count or met.num_processes or 1
        self._client: Any = client or met.client

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns in the first process, which alone calls it.

        Raises in all what it raised there: ConfigError, or EngineError for anything else.
        """
        if self.count == 1:
            return make()
        data, error = b"", None
        if self.number == 0:
            try:
                data = b"\0" + make()
            except Exception as raised:  # the others wait
                error, data = raised, _told(raised, self.number)
        (data,) = self._exchanged({0: data})
        if error is not None:
            raise error
        if data[:1] != b"\0":
            raise _error(data)
        return data[1:]

    def everyones(self, value: Any) -> list[Any]:
        """What each process has, by its number: JSON values."""
        if self.count == 1:
            return [value]
        mine = json.dumps(value).encode()
        found = self._exchanged({i: mine for i in range(self.count)})
        return [json.loads(data) for data in found]

    def by_all(self, make: Callable[[], Any]) -> list[Any]:
        """What `make` returns in each process: JSON values. Raises in all what one raised."""
        error: Exception | None = None
        made: dict[str, Any] = {}
        try:
            made["value"] = make()
        except Exception as raised:  # the others wait
            error, made["error"] = raised, _told(raised, self.number).decode()
        found = self.everyones(made)
        if error is not None:
            raise error
        for other in found:
            if "error" in other:
                raise _error(other["error"].encode())
        return [other["value"] for other in found]

    def _exchanged(self, said: dict[int, bytes]) -> list[bytes]:
        """Of each process that speaks what it says; `said` has the own words."""
        key, self._said = f"jaxmoe/{self._name}/{self._said}", self._said + 1
        mine = said.get(self.number)
        if mine is not None:
            pieces = range(0, len(mine), PIECE_BYTES)
            for n, at in enumerate(pieces):
                self._client.key_value_set_bytes(
                    f"{key}/{self.number}/{n}", mine[at : at + PIECE_BYTES]
                )
            self._client.key_value_set(f"{key}/{self.number}/pieces", str(len(pieces)))
        found = [mine if i == self.number else self._read(f"{key}/{i}") for i in said]
        self._client.wait_at_barrier(f"{key}/read", WAIT_MS)
        if mine is not None:
            self._client.key_value_delete(f"{key}/{self.number}")
        return [data or b"" for data in found]

    def _read(self, key: str) -> bytes:
        pieces = int(self._client.blocking_key_value_get(f"{key}/pieces", WAIT_MS))
        get = self._client.blocking_key_value_get_bytes
        return b"".join(get(f"{key}/{n}", WAIT_MS) for n in range(pieces))


def _told(error: Exception, number: int) -> bytes:
    known = type(error).__name__ in _ERRORS or isinstance(error, EngineError)
    kind = "ConfigError" if isinstance(error, ConfigError) else "EngineError"
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return json.dumps([kind, number, text]).encode()


def _error(data: bytes) -> Exception:
    kind, number, text = json.loads(data)
    return _ERRORS[kind](text if kind == "ConfigError" else f"process {number}: {text}")
