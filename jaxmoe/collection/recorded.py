# SPDX-License-Identifier: Apache-2.0
"""Rows of samples.jsonl: a selection of a run's answers for people to read.

Each evaluation records a few held-out prompts, different ones each time; each recorded step has
a few groups with the advantage and the log-prob gap of each token. Texts are truncated to bound
the length of a line. Next: jaxmoe/observe/samples_page.py displays them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxmoe.collection.scores import response_text
from jaxmoe.collection.tasks import Task
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.environments.transcripts import ENVIRONMENT, list_parts, make_transcript, read_last_turn
from jaxmoe.records import Prompt, Rollout, StopReason, split_by_turn

N_PROMPTS = 8  # held-out prompts per evaluation
N_GROUPS = 2  # groups per step
MAX_SAMPLES = 8  # per group
MAX_CHARS = 4_000  # of a text: half from its start, half from its end
MAX_TOKENS = 512  # of an answer, recorded one by one
MAX_TEXTS = 64  # messages of an episode
MIN_CHARS = 200  # of each of them, however many there are

Row = dict[str, Any]


def rotate_rows(count: int, number: int) -> list[int]:
    """Indices of the rows to record at evaluation `number`; they rotate through all rows."""
    first = number * N_PROMPTS
    return list(dict.fromkeys((first + i) % count for i in range(min(N_PROMPTS, count))))


def held_out_rows(
    rollouts: Sequence[Rollout], rewards: np.ndarray, task: Task, number: int
) -> list[Row]:
    """Rows of the greedy answers to some held-out prompts, which rotate with `number`."""
    return [
        _prompt_row("held_out", rollouts[i].prompt)
        | _answer_row(rollouts[i], float(rewards[i]), task)
        for i in rotate_rows(len(rollouts), number)
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
    """Rows of the first and the last group of a step.

    Dynamic sampling puts groups with unequal rewards first, so these two differ most.

    Each token of the policy has logp − rollout_logp in nats, and exp(rollout_logp). Advantage and
    gaps are over the policy's tokens. The environment's tokens have neither.
    """
    starts = range(0, len(rollouts), samples)
    rows = []
    for start in sorted({starts[0], starts[-1]})[:N_GROUPS]:
        answers = []
        for i in range(start, start + min(samples, MAX_SAMPLES)):
            rollout = rollouts[i]
            span = slice(
                len(rollout.prompt.tokens), len(rollout.prompt.tokens) + len(rollout.tokens)
            )
            is_sampled = rollout.sampled_mask
            trained = bool(mask_BT[i, span].any())
            gaps = logp_BT[i, span] - rollout_logp_BT[i, span]
            abs_gaps = np.abs(gaps[is_sampled]) if len(gaps) else np.array([np.nan])
            advantages = advantages_BT[i, span][is_sampled]
            answers.append(
                _answer_row(rollout, float(rewards[i]), task)
                | {
                    "advantage": _round_number(advantages.mean()) if trained else None,
                    "gap_mean": _round_number(abs_gaps.mean()),
                    "gap_max": _round_number(abs_gaps.max()),
                    "length": rollout.n_sampled,
                    **_turn_advantages(rollout, advantages_BT[i, span]),
                    "tokens": _token_rows(
                        rollout, gaps, rollout_logp_BT[i, span], task.tokenizer.decode
                    ),
                }
            )
        rows.append(_prompt_row("group", rollouts[start].prompt) | {"samples": answers})
    return rows


def _prompt_row(kind: str, prompt: Prompt) -> Row:
    answer = None if prompt.answer is None else truncate_text(prompt.answer)
    return {"kind": kind, "row": prompt.id, "prompt": truncate_text(prompt.text), "answer": answer}


def _answer_row(rollout: Rollout, reward: float, task: Task) -> Row:
    fault = rollout.env_fault
    if rollout.stop is StopReason.PARSE_ERROR:
        fault = read_last_turn(rollout, task.tokenizer).problem
    return {
        "response": truncate_text(response_text(rollout, task)),
        "reward": _round_number(reward),
        "stop": str(rollout.stop),
        **({"fault": truncate_text(fault, MIN_CHARS)} if fault else {}),
        **_turn_row(rollout, reward),
    } | _episode_row(rollout, task.tokenizer)


def _episode_row(rollout: Rollout, tokenizer: Tokenizer) -> Row:
    """[writer, speaker, text] of each message, and the environment's tokens; {} without any."""
    entries = make_transcript(rollout, tokenizer)
    if not entries:
        return {}
    limit = max(MAX_CHARS // len(entries), MIN_CHARS)
    texts = [
        [entry.writer, truncate_text(entry.speaker, MIN_CHARS), truncate_text(entry.text, limit)]
        for entry in entries
    ]
    # The start of an episode shows what was asked, its end what was answered.
    n_omitted = len(texts) - MAX_TEXTS
    if n_omitted > 0:
        half = MAX_TEXTS // 2
        texts[half : half + n_omitted] = [[ENVIRONMENT, "", f"[…{n_omitted} messages…]"]]
    n_env = len(rollout.tokens) - rollout.n_sampled
    return {"turns": len(rollout.turns), "env_length": n_env, "transcript": texts}


def _turn_row(rollout: Rollout, reward: float) -> Row:
    """The rewards of the turns, which add up to the answer's; {} if all of it is at the end."""
    if rollout.token_rewards is None or len(rollout.turns) < 2 or not math.isfinite(reward):
        return {}
    return {"turn_rewards": [_round_number(x) for x in split_by_turn(rollout, reward)]}


def _turn_advantages(rollout: Rollout, advantages_T: np.ndarray) -> Row:
    """The mean advantage of each turn; {} if all tokens have the same."""
    means = [float(advantages_T[start:end].mean()) for start, end in rollout.turns]
    return {"turn_advantages": [_round_number(x) for x in means]} if len({*means}) > 1 else {}


def truncate_text(text: str, limit: int = MAX_CHARS) -> str:
    """The start and end of a text, with the number of omitted characters between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} […{len(text) - 2 * half:,} characters…] {text[-half:]}"


def _token_rows(
    rollout: Rollout,
    gaps: np.ndarray,
    rollout_logp: np.ndarray,
    decode: Callable[[list[int]], str],
) -> list[list[Any]]:
    """Entries of the first MAX_TOKENS tokens: those of the policy, and [text] of each reply."""
    rows: list[list[Any]] = []
    for start, full_end, is_policy in list_parts(rollout):
        end = min(full_end, MAX_TOKENS)
        if start >= end:
            break
        ids = rollout.tokens[start:end].tolist()
        if is_policy:
            rows += _policy_rows(ids, gaps[start:end], np.exp(rollout_logp[start:end]), decode)
        else:
            rows.append([truncate_text(decode(ids))])
    return rows


def _policy_rows(
    ids: list[int], gaps: np.ndarray, probs: np.ndarray, decode: Callable[[list[int]], str]
) -> list[list[Any]]:
    """[text, gap, probability] of each token.

    Tokens that encode one character together become one entry, with the largest gap of them and
    the product of their probabilities.
    """
    rows, start = [], 0
    for end in range(1, len(ids) + 1):
        # A character of UTF-8 has up to four bytes, and a token may end in the middle of one.
        text = decode(ids[start:end])
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue
        gap = max(gaps[start:end], key=abs)
        rows.append(
            [truncate_text(text), _round_number(gap), _round_number(probs[start:end].prod())]
        )
        start = end
    return rows


def _round_number(value: Any) -> float | None:
    """The value rounded to four digits; None if it is not finite."""
    return float(f"{float(value):.4g}") if math.isfinite(value) else None
