# SPDX-License-Identifier: Apache-2.0
"""Several processes as threads: a double of the service that processes meet at."""

import threading
from concurrent.futures import ThreadPoolExecutor

from jaxmoe.distributed.channel import Channel


class Board:
    """jax's coordination client, as far as a Channel asks it; all threads share one."""

    def __init__(self, count):
        self.count, self.values, self.arrived = count, {}, {}
        self.changed = threading.Condition()
        self.largest = 0  # bytes of one message

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values, "each key is written once"
            self.values[key] = value
            self.largest = max(self.largest, len(value))
            self.changed.notify_all()

    def blocking_key_value_get(self, key, ms):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 20), f"no process set {key}"
            return self.values[key]

    key_value_set_bytes, blocking_key_value_get_bytes = key_value_set, blocking_key_value_get

    def wait_at_barrier(self, key, ms):
        with self.changed:
            self.arrived[key] = self.arrived.get(key, 0) + 1
            assert self.arrived[key] <= self.count, "a barrier of one name is met once"
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.arrived[key] >= self.count, 20), key

    def key_value_delete(self, key):
        with self.changed:
            for name in [n for n in self.values if n.startswith(key + "/")]:
                del self.values[name]


def as_processes(count, fn, board=None):
    """fn(channel) of each of `count` processes, by its number; or the exception it raised."""
    board = board or Board(count)

    def process(number):
        try:
            return fn(Channel("test", client=board, number=number, count=count))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(process, range(count)))
