# SPDX-License-Identifier: Apache-2.0
"""What a run keeps of its answers, to be read by people: a line of samples.jsonl each.

A few held-out prompts, others at each evaluation; a few groups of the step that was trained on,
with what each token was worth. Texts are cut, so that a line has a bound.
Next: jaxmoe/observe/samples_page.py shows them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxmoe.envs.tasks import Task, response_text
from jaxmoe.records import Prompt, Rollout

PROMPTS = 8  # held-out ones, each time
GROUPS = 2  # of a step
SAMPLES = 8  # of a group
CHARACTERS = 4_000  # of a text: its beginning and its end
TOKENS = 512  # of an answer, token by token

Row = dict[str, Any]


def turn(count: int, number: int) -> list[int]:
    """Rows to show the number-th time: the next ones, over and over."""
    first = number * PROMPTS
    return list(dict.fromkeys((first + i) % count for i in range(min(PROMPTS, count))))


def held_out_rows(
    rollouts: Sequence[Rollout], rewards: np.ndarray, task: Task, number: int
) -> list[Row]:
    """Greedy answers to some of the held-out prompts, by turns."""
    return [
        _asked("held_out", rollouts[i].prompt) | _answered(rollouts[i], float(rewards[i]), task)
        for i in turn(len(rollouts), number)
    ]


def group_rows(
    rollouts: Sequence[Rollout],
    rewards: np.ndarray,
    task: Task,
    *,
    samples: int,
    mask_BT: np.ndarray,
    advantages_BT: np.ndarray,
    logp_BT: np.ndarray,
    rollout_logp_BT: np.ndarray,
) -> list[Row]:
    """The first and the last group of a step: dynamic sampling puts those with a signal first.

    Each token carries logp − rollout_logp, nats, and exp(rollout_logp). The advantage is the mean
    over the answer's tokens.
    """
    starts = range(0, len(rollouts), samples)
    rows = []
    for start in sorted({starts[0], starts[-1]})[:GROUPS]:
        answers = []
        for i in range(start, start + min(samples, SAMPLES)):
            r = rollouts[i]
            at = slice(len(r.prompt.tokens), len(r.prompt.tokens) + len(r.tokens))
            trained = bool(mask_BT[i, at].any())
            gaps = logp_BT[i, at] - rollout_logp_BT[i, at]
            far = np.abs(gaps) if len(gaps) else np.array([np.nan])
            answers.append(_answered(r, float(rewards[i]), task) | {
                "advantage": _number(advantages_BT[i, at].mean()) if trained else None,
                "gap_mean": _number(far.mean()), "gap_max": _number(far.max()),
                "length": len(r.tokens),
                "tokens": _pieces(r.tokens[:TOKENS].tolist(), gaps, np.exp(rollout_logp_BT[i, at]),
                                  task.tokenizer.decode),
            })  # fmt: skip
        rows.append(_asked("group", rollouts[start].prompt) | {"samples": answers})
    return rows


def _asked(kind: str, prompt: Prompt) -> Row:
    answer = None if prompt.answer is None else cut(prompt.answer)
    return {"kind": kind, "row": prompt.id, "prompt": cut(prompt.text), "answer": answer}


def _answered(rollout: Rollout, reward: float, task: Task) -> Row:
    return {
        "response": cut(response_text(rollout, task)), "reward": _number(reward),
        "stop": str(rollout.stop),
    }  # fmt: skip


def cut(text: str) -> str:
    """A text's beginning and end, and how much is between them."""
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]} […{len(text) - 2 * half:,} characters…] {text[-half:]}"


def _pieces(
    ids: list[int], gaps: np.ndarray, probs: np.ndarray, decode: Callable[[list[int]], str]
) -> list[list[Any]]:
    """[text, gap, probability] of each token; tokens that make one character between them are one.

    Such a piece has its largest gap, and the product of the probabilities.
    """
    pieces, start = [], 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue  # the first bytes of a character
        gap = max(gaps[start:end], key=abs)
        pieces.append([cut(text), _number(gap), _number(probs[start:end].prod())])
        start = end
    return pieces


def _number(value: Any) -> float | None:
    """Four digits are enough to read; None for what is not finite."""
    return float(f"{float(value):.4g}") if math.isfinite(value) else None
