# SPDX-License-Identifier: Apache-2.0
"""Which processes of a run still live, when a collective failed.

A failed collective names no process. So each process answers in a thread of its own, which also
runs while its main thread computes or waits; who does not answer is gone.
Next: jaxmoe/distributed/processes.py.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src import distributed  # jax has no public name for the service

ANSWER_S = 6.0  # for an answer; several times the pause between two looks
_PAUSE_S = 0.5
_QUESTION, _ANSWERS = "jaxmoe/roll_call/question", "jaxmoe/roll_call/answers"


@contextmanager
def answering_roll_calls(client: Any = None, number: int | None = None) -> Iterator[None]:
    """Answer for this process while the block runs. It does nothing with a single process."""
    client = client or distributed.global_state.client
    number = distributed.global_state.process_id if number is None else number
    if client is None:
        yield
        return
    end = threading.Event()

    def answer() -> None:
        while not end.wait(_PAUSE_S):
            try:
                if client.key_value_dir_get(_QUESTION):
                    client.key_value_set(f"{_ANSWERS}/{number}", "here", allow_overwrite=True)
                    return
            except Exception:  # the service ended with process 0, and jax ends this process
                return

    thread = threading.Thread(target=answer, name="roll call", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def find_lost_processes(
    client: Any = None, number: int | None = None, count: int | None = None
) -> list[int]:
    """Numbers of the processes that do not answer within ANSWER_S; each may ask by itself."""
    service = distributed.global_state
    client = client or service.client
    number = service.process_id if number is None else number
    deadline = time.monotonic() + ANSWER_S
    peers = [i for i in range(count or service.num_processes or 1) if i != number]
    if client is None or not peers:
        return []
    missing = set(peers)
    try:
        client.key_value_set(f"{_ANSWERS}/{number}", "here", allow_overwrite=True)
        client.key_value_set(f"{_QUESTION}/0", "who lives?", allow_overwrite=True)
        while missing and time.monotonic() < deadline:
            answers = client.key_value_dir_get(_ANSWERS)
            missing -= {int(key.rpartition("/")[2]) for key, _ in answers}
            time.sleep(0.1)
    except Exception:  # the service runs in process 0
        return [0]
    if number == 0 and missing:
        time.sleep(2 * _PAUSE_S)  # others that ask still need the service
    return sorted(missing)
