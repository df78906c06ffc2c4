# SPDX-License-Identifier: Apache-2.0
"""Reward functions in every convention, good and bad, and the samples that they are given.

Tests name them as some_rewards:NAME.
"""

import asyncio
import functools
import math
import sys
from typing import Any

import numpy as np

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.rewards import read_rewards, score_samples

ROWS = [
    {"prompt": "1+1=", "solution": "2", "level": 1},
    {
        "prompt": [{"role": "user", "content": "1+2="}],
        "level": 2,
        "data_source": "sums",
        "reward_model": {"ground_truth": 3},
        "extra_info": {"index": 7, "tags": ["a"]},
    },
]
COLUMNS = [*ROWS[0], *ROWS[1]]
RECEIVED = {}


def make_samples(*texts):
    return [
        Sample(
            i,
            read_row(f"a:{i + 1}", ROWS[i % 2], answers=False),
            ParsedResponse(text, "hm"),
            [65, i],
        )
        for i, text in enumerate(texts)
    ]


def trl(prompts, completions, solution, level=None, *, bonus=1.0, **columns):
    RECEIVED["trl"] = {
        "prompts": prompts,
        "completions": completions,
        "solution": solution,
        "level": level,
        **columns,
    }
    return [
        None if gold is None else bonus * (text == gold)
        for text, gold in zip(completions, solution, strict=True)
    ]


def only_ids(completion_ids, **columns):
    return np.array([len(ids) for ids in completion_ids], np.float32)


def counts_trick(prompt, response, row):
    return {"score": 1.0, "hack/trick": 0.5}


def verl(data_source, solution_str, ground_truth, extra_info: Any = None):
    RECEIVED.setdefault("verl", []).append(
        (data_source, solution_str, ground_truth, dict(extra_info))
    )
    extra_info["num_turns"] = 1  # as verl's own manager does to its rows
    is_correct = str(ground_truth) in solution_str
    return {
        "score": float(is_correct),
        "acc": is_correct,
        "pred": solution_str,
        "half": np.float32(0.5),
    }


def native(prompt, response, row, analysis, *, length=4):
    RECEIVED.setdefault("native", []).append((prompt, response, row["level"], analysis))
    return np.True_ if len(response) < length else False


def scores_few(response):
    """A function for some of the rows."""
    return None if response == "none" else float("nan")


def own_source(response, row):
    return float(row["answer"] == response)


def raises(prompt, response, row):
    return row["no such column"]


def refuses_level_two(response, row):
    """As a shipped grader refuses a row without what it needs."""
    if row["level"] == 2:
        raise ConfigError("rows must have level 1")
    return 1.0


def by_level(completions, level, **columns):
    return [0.5 if x is None else float(x) for x in level]


def leaves(prompt, response, row):
    sys.exit(0)


def returns(prompt, response, row, *, value=None):
    values = {
        "nan": math.nan,
        "inf": np.inf,
        "huge": 1e39,
        "text": "1",
        "array": np.ones(3),  # of one turn and two tokens
        "numpys": np.str_("1"),
    }
    return values.get(value, value) if isinstance(value, str) else value


def batch(completions, *, value: Any = None, **columns):
    return {
        "short": [1.0],
        "number": 1.0,
        "text": "ab",
        "dict": {0: 1, 1: 1},
        "nan": [1, math.nan],
        "strings": ["1", "2"],
        "mixed": [1, "2"],
    }.get(value)


def none_at_all(completions, **columns):
    return [None for _ in completions]


def two_numbers(x, y):
    return x + y


def anything(response, *args):
    return 1.0


def of_verl(solution_str, model):
    return 1.0


def all_keywords(**kwargs):
    RECEIVED["all_keywords"] = kwargs
    return [float(len(c)) for c in kwargs["completions"]]


def of_trainer(completions, trainer_state, **columns):
    return [float(trainer_state.global_step) for _ in completions]


def in_batches(data_sources, solution_strs, ground_truths, extra_infos):
    RECEIVED["batch"] = (data_sources, solution_strs, ground_truths, extra_infos)
    return [{"score": 1.0, "acc": True}, None][: len(solution_strs)]


async def waits(completions, **columns):
    await asyncio.sleep(0.01)
    return [1.0 for _ in completions]


async def judges(solution_str, ground_truth):
    """Returns when all of them have been asked, and never where they are asked one by one."""
    RECEIVED["asked"] = RECEIVED.get("asked", 0) + 1
    while RECEIVED["asked"] < 8:
        await asyncio.sleep(0.001)
    return None if solution_str == "7" else float(solution_str)


class Constant:
    def __init__(self, worth):
        self.worth = worth

    def __call__(self, completions, *, bonus=0.0, **columns):
        return [self.worth + bonus for _ in completions]

    def method(self, response):
        return self.worth


class Waiting:
    async def __call__(self, response):
        return 3.0


constant, waiting = Constant(2.0), Waiting()
bound = functools.partial(constant, bonus=0.5)


def score_texts(text, *texts, columns=COLUMNS):
    return score_samples(read_rewards(text, columns), make_samples(*texts))
