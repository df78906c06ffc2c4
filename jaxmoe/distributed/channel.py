# SPDX-License-Identifier: Apache-2.0
"""Messages between processes without a device, through jax's coordination service.

A device collective is no place to wait in: launch/env.sh makes NCCL end it after five minutes. A
channel waits as long as the other processes live, and in any thread, since its messages are not
ordered with a device's programs. It carries what hosts make: rollouts, digests, errors.
Next: jaxmoe/vllm/engine/multi_process_engine.py.
"""

import json
from collections.abc import Callable
from typing import Any

from jax._src import distributed  # jax has no public name for the service

from jaxmoe.config import ConfigError, EngineError

CHUNK_BYTES = 1 << 20  # of one message; gRPC accepts at most 4 MiB
WAIT_MS = 24 * 3600 * 1000  # a dead process ends the run much sooner, by its missing heartbeat
_ERRORS = {kind.__name__: kind for kind in (EngineError, ConfigError)}


class Channel:
    """A named channel of all processes; all call each of its methods, in the same order."""

    def __init__(
        self, name: str, *, client: Any = None, number: int | None = None, count: int | None = None
    ) -> None:
        self._name, self._n_exchanges = name, 0
        service = distributed.global_state  # jax.process_index() would open the device
        self.number = service.process_id if number is None else number
        self.count = count or service.num_processes or 1
        self._client: Any = client or service.client

    def broadcast_from_first(self, make: Callable[[], bytes]) -> bytes:
        """Return the result of `make`, which only the first process calls. Its exception is raised
        in all processes: ConfigError, or EngineError for any other."""
        if self.count == 1:
            return make()
        data, error = b"", None
        if self.number == 0:
            try:
                # A leading zero byte distinguishes a result from an error, which is JSON and cannot
                # begin with one.
                data = b"\0" + make()
            # Any error is sent to the other processes, which wait for this message.
            except Exception as raised:
                error, data = raised, _encode_error(raised, self.number)
        (data,) = self._exchange_messages({0: data})
        if error is not None:
            raise error
        if data[:1] != b"\0":
            raise _decode_error(data)
        return data[1:]

    def gather_values(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes, by process number."""
        if self.count == 1:
            return [value]
        message = json.dumps(value).encode()
        messages = self._exchange_messages({i: message for i in range(self.count)})
        return [json.loads(data) for data in messages]

    def gather_results(self, make: Callable[[], Any]) -> list[Any]:
        """Call `make` in each process and return all results, JSON values, by process number. An
        exception of one process is raised in all."""
        error: Exception | None = None
        outcome: dict[str, Any] = {}
        try:
            outcome["value"] = make()
        # As above: a process that raised without a message would leave the others waiting.
        except Exception as raised:
            error, outcome["error"] = raised, _encode_error(raised, self.number).decode()
        outcomes = self.gather_values(outcome)
        if error is not None:
            raise error
        for outcome in outcomes:
            if "error" in outcome:
                raise _decode_error(outcome["error"].encode())
        return [outcome["value"] for outcome in outcomes]

    def _exchange_messages(self, messages: dict[int, bytes]) -> list[bytes]:
        """Return the message of each sender; `messages` has the senders as keys, and this process's
        data."""
        # A key of the service can be set once, so each exchange has its own.
        key, self._n_exchanges = f"jaxmoe/{self._name}/{self._n_exchanges}", self._n_exchanges + 1
        message = messages.get(self.number)
        if message is not None:
            starts = range(0, len(message), CHUNK_BYTES)
            for n, start in enumerate(starts):
                self._client.key_value_set_bytes(
                    f"{key}/{self.number}/{n}", message[start : start + CHUNK_BYTES]
                )
            # Readers wait for this key. It is written last, so the chunks are there when it
            # appears.
            self._client.key_value_set(f"{key}/{self.number}/chunks", str(len(starts)))
        replies = [
            message if i == self.number else self._read_message(f"{key}/{i}") for i in messages
        ]
        # The message may be deleted only when every process has read it.
        self._client.wait_at_barrier(f"{key}/read", WAIT_MS)
        if message is not None:
            self._client.key_value_delete(f"{key}/{self.number}")
        return [data or b"" for data in replies]

    def _read_message(self, key: str) -> bytes:
        n_chunks = int(self._client.blocking_key_value_get(f"{key}/chunks", WAIT_MS))
        get_bytes = self._client.blocking_key_value_get_bytes
        return b"".join(get_bytes(f"{key}/{n}", WAIT_MS) for n in range(n_chunks))


def _encode_error(error: Exception, number: int) -> bytes:
    is_known = type(error).__name__ in _ERRORS or isinstance(error, EngineError)
    kind = "ConfigError" if isinstance(error, ConfigError) else "EngineError"
    text = str(error) if is_known else f"{type(error).__name__}: {error}"
    return json.dumps([kind, number, text]).encode()


def _decode_error(data: bytes) -> Exception:
    kind, number, text = json.loads(data)
    return _ERRORS[kind](text if kind == "ConfigError" else f"process {number}: {text}")
