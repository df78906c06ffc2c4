# SPDX-License-Identifier: Apache-2.0
"""Values that a file of others may have at any place, and lines of a run folder to put them into.

Next: test_hostile_files.py, benchmarks/fault_files.py.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

RAW = {
    "@deep@": "[" * 3_000 + "]" * 3_000,
    "@deepish@": "[" * 700 + "]" * 700,
    "@objects@": '{"a":' * 3_000 + "1" + "}" * 3_000,
    "@digits@": "9" * 5_000,
    "@power@": "1e400",
    "@minus@": "-" + "9" * 400,
    "@nan@": "NaN",
}
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**400,
    1_000_000_000,
    1e308,
    "",
    "x" * 5_000,
    "../x",
    "\ud800",
    "a\nb",
    [],
    {},
    [None],
    [[1]],
    {"content": ["a"]},
    {"a": {}},
    ["a", 1],
    *RAW,
]
TOKEN = ["a", -0.02, 0.5]
ANSWER = {
    "response": "r",
    "reward": 1.0,
    "stop": "stop_token",
    "advantage": 0.5,
    "gap_mean": 1e-3,
    "gap_max": 0.02,
    "length": 1,
    "tokens": [TOKEN],
}
FIELDS = {"stage": "rl", "step": 2, "row": 3, "prompt": "p", "answer": "a"}
METRICS = {
    "stage": "rl",
    "step": 3,
    "reward/mean": 0.5,
    "eval/accuracy": 0.5,
    "time/step_s": 1.0,
    "eval/accuracy_greedy": 0.5,
    "eval/pass@2": 0.5,
    "time/train_s": 0.5,
    "grad/norm": 1.0,
    "train_rollout_logprob_abs_diff": 1e-6,
    "alerts": ["a"],
}


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place of a document."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def replaced(document: Any, path: tuple, value: Any) -> str:
    document = copy.deepcopy(document)
    node = document
    for key in path[:-1]:
        node = node[key]
    if path:
        node[path[-1]] = value
    else:
        document = value
    text = json.dumps(document)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text
