# SPDX-License-Identifier: Apache-2.0
"""An environment and a reward function that break where a plan says so.

The plan says by a row's question in which method, and how. Next: fault_episodes.py.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from jaxmoe.data.rows import prompt_messages

PLAN_VARIABLE = "JAXMOE_FAULT_PLAN"  # the path of a JSON file: {"question": [method, fault]}
HANG_S = 50.0  # longer than a reply, three resets or a call may take
PAID = 0.5  # by the environment, to every episode


class Unprintable(Exception):
    """An error whose text is an error."""

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}{b}\x1b[2J\ud800")
        self.lock = threading.Lock()


def recurse():
    return recurse()


def throw(error):
    raise error


# what any code of a user may do
COMMON = {
    "raise": lambda: throw(ConnectionError("lost")),
    "exit": lambda: sys.exit(3),
    "exit 0": lambda: sys.exit(),
    "unprintable": lambda: throw(Unprintable()),
    "unpicklable": lambda: throw(Unpicklable(1, 2)),
    "recursion": recurse,
    "generator exit": lambda: throw(GeneratorExit()),
    "memory": lambda: throw(MemoryError()),
    "stop iteration": lambda: throw(StopIteration(1)),
    "base": lambda: throw(BaseException("x")),
    "long": lambda: throw(RuntimeError("x\n" * 1_000_000)),
    "hang": lambda: time.sleep(HANG_S),
    "group": lambda: throw(ExceptionGroup("g", [OSError(28, "full")])),
    "disk": lambda: throw(OSError(28, "full")),
    "timeout": lambda: throw(TimeoutError()),
    "cancelled": lambda: throw(__import__("asyncio").CancelledError()),
}
# what ends or confuses a process of its own
PROCESS = {
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "_exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close": lambda: os.closerange(3, 64),
    "garbage": lambda: [_write(n, b"\0\0\0\x05hello") for n in range(3, 16)],
    "binary": lambda: os.write(1, bytes(range(256))),
}
# results that nobody can use, of a step and of a reward function
STEPS = (
    None,
    1,
    (),
    ([], 0.0, False, False, {}),
    ([], float("nan"), True, False, {}),
    (["x"], 1e40, False, False, {}),
    (["x" * 2_000_000], 0.0, False, False, {}),
    ([{"role": "god", "content": "x"}], 0.0, False, False, {}),
    ([], 0.0, "yes", False, {}),
    ([], 0.0, True, False, {"metrics": {"a": "b"}}),
    ([], 0.0, True, False, {"rewards": {"a": 3.0}}),
)
SCORES = (
    float("nan"),
    float("inf"),
    "1",
    [1.0],
    {"score": "x"},
    {"score": None},
    1e300,
    b"1",
    {"score": float("nan")},
)


def read_plan() -> dict[str, list]:
    return json.loads(Path(os.environ[PLAN_VARIABLE]).read_text())


def _write(number, content):
    try:
        os.write(number, content)
    except OSError:
        pass


def break_here(question, method):
    """Do what the plan says of this row and method. Return True if the result must be unusable."""
    where, fault = read_plan().get(question, ["", ""])
    if where != method:
        return False
    if fault == "result":
        return True
    (COMMON | PROCESS)[fault]()
    return False


class Environment:
    """Pays PAID at the end, for whatever the policy does."""

    def reset(self, row, *, seed):
        self.question = row.question
        return (5, 5) if break_here(self.question, "reset") else (prompt_messages(row), {})

    def step(self, messages):
        if break_here(self.question, "step"):
            return STEPS[hash(self.question) % len(STEPS)]
        return [], PAID, True, False, {"metrics": {"seen": 1.0}}

    def close(self):
        return {"late": "much"} if break_here(self.question, "close") else None


def score(prompt, response, row):
    """1 for the right answer."""
    if break_here(row["question"], "reward"):
        return SCORES[hash(row["question"]) % len(SCORES)]
    return float(response.strip() == row["answer"])
