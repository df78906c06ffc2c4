# SPDX-License-Identifier: Apache-2.0
"""Targets of a warm start: stored answers, or demonstrations of complete episodes.

Next: jaxmoe/train.py trains on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from jaxmoe.batches.batch import Batch, supervised_batch
from jaxmoe.collection.tasks import Task
from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.parse import answer_prefix
from jaxmoe.data.harmony.render import write_messages, write_turn
from jaxmoe.data.rows import Message
from jaxmoe.records import Prompt, Sampling
from jaxmoe.user_code import user_code


def check_targets(task: Task, length: int) -> None:
    """Check that a warm start can train on the rows that are checked before a run.

    Raises ConfigError if a target is missing, if a row has more than `length` tokens, or if no
    policy could sample a demonstration.
    """
    prompts = [task.make_prompt(task.train, i) for i in task.rows_to_check(task.train)]
    targets = [warm_start_target(prompt, task) for prompt in prompts]
    longest = max(
        range(len(prompts)), key=lambda i: len(prompts[i].tokens) + len(targets[i].tokens)
    )
    make_warm_start_batch([prompts[longest]], [targets[longest]], task, length)
    if task.demonstrate is not None:
        for prompt, target in zip(prompts, targets, strict=True):
            check_samplable(prompt, target, task.sampling)


def check_samplable(prompt: Prompt, target: "WarmStartTarget", sampling: Sampling) -> None:
    """Raise ConfigError for a demonstration that no policy can sample within the run's limits.

    A policy that learned it would be cut off in the middle of a turn, and never be paid.
    """
    edges = np.flatnonzero(np.diff(np.array(target.policy_mask, np.int8), prepend=0, append=0))
    turns = [int(end - start) for start, end in edges.reshape(-1, 2)]
    for key, limit, actual, unit in (
        ("max_turns", sampling.max_turns, len(turns), "turns"),
        ("max_turn_tokens", sampling.max_turn_tokens, max(turns), "tokens in a turn"),
        ("max_new_tokens", sampling.max_new_tokens, sum(turns), "tokens of the policy"),
    ):
        if 0 < limit < actual:
            raise ConfigError(
                f"warmup.demonstrations must show what the policy can sample: rollout.{key} is "
                f"{limit}, and the demonstration of row {prompt.id} has {actual} {unit}. Try --set "
                f"rollout.{key}={actual}."
            )


@dataclass(frozen=True)
class WarmStartTarget:
    """Tokens behind a prompt; those of the policy are trained on."""

    tokens: list[int]
    policy_mask: list[bool]


def make_warm_start_batch(
    prompts: Sequence[Prompt], targets: Sequence[WarmStartTarget], task: Task, length: int
) -> Batch:
    """Return the batch of a supervised step.

    Raises: ConfigError if a row has more than `length` tokens.
    """
    for prompt, target in zip(prompts, targets, strict=True):
        n = len(prompt.tokens) + len(target.tokens)
        if task.sampling.max_context and n > length:
            raise ConfigError(
                f"prompt and demonstration must fit in rollout.max_context ({length} tokens); row "
                f"{prompt.id} has {n}. Try --set rollout.max_context={n}."
            )
    return supervised_batch(
        prompts,
        [target.tokens for target in targets],
        length=length,
        pad_id=task.tokenizer.pad_id,
        masks=[target.policy_mask for target in targets],
    )


def warm_start_target(prompt: Prompt, task: Task) -> WarmStartTarget:
    """The demonstration of a row, or its stored answer.

    Turns of the policy are written as harmony has them, tool calls end in <|call|> and the final
    answer in <|return|>; messages of others are not trained on.
    """
    if task.demonstrate is None:
        tokens = answer_tokens(prompt, task)
        return WarmStartTarget(tokens, [True] * len(tokens))
    tokens, policy_mask = list[int](), list[bool]()
    try:
        with user_code():
            returned = task.demonstrate(task.train[prompt.id])
    except Exception as error:  # the user's function: its traceback is theirs to read
        error.add_note(f"warmup.demonstrations raised this on row {prompt.id}.")
        raise
    messages = _check_demonstration(returned, prompt)
    for is_policy, group in groupby(messages, key=lambda message: message.role == "assistant"):
        written = (write_turn if is_policy else write_messages)(list(group), task.tokenizer)
        tokens += written
        policy_mask += [is_policy] * len(written)
    return WarmStartTarget(tokens, policy_mask)


def _check_demonstration(messages: Any, prompt: Prompt) -> list[Message]:
    is_valid = (
        isinstance(messages, Sequence)
        and len(messages) > 0
        and all(isinstance(message, Message) for message in messages)
        and messages[0].role == messages[-1].role == "assistant"
    )
    if not is_valid:
        raise ConfigError(
            "warmup.demonstrations must return a list of jaxmoe.data.rows.Message that begins and "
            f"ends with one of the assistant; on row {prompt.id} it returned {messages!r:.80}."
        )
    return list(messages)


def answer_tokens(prompt: Prompt, task: Task) -> list[int]:
    """The stored answer and the stop token, as a warm start trains on them."""
    if prompt.answer is None:
        raise ConfigError(
            f"a warm start needs stored answers, and row {prompt.id} has none. "
            "Try --set warmup.steps=0."
        )
    opening = answer_prefix(prompt.tokens, task.tokenizer)
    answer = task.tokenizer.encode(prompt.answer)
    return [*opening, *answer, task.tokenizer.stop_ids[0]]
