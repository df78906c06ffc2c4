# SPDX-License-Identifier: Apache-2.0
"""Prompts of the native engine: which it takes, how many a batch has, and the slots that they need.

Next: jaxmoe/rollout/native.py samples their answers.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.records import Prompt

MIN_PROMPT_TOKENS = 32  # prompts are padded to this times a power of two, or to `prompt_slots`
MOST_SHARED_CACHE = 0.75


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raise ConfigError for prompts that a forward would silently misread."""
    if not len(prompt.tokens):
        raise ConfigError(
            f"prompt {prompt.id} must have at least one token, got none: the first answer token "
            "is predicted from the prompt. Begin it with a start token."
        )
    bad = [token for token in prompt.tokens if not 0 <= token < vocab_size]
    if bad:
        raise ConfigError(
            f"prompt {prompt.id}: token ids must be from 0 to {vocab_size - 1} "
            f"(model.vocab_size), got {bad[0]}. Use the model's tokenizer."
        )


def shares_prompt_keys(
    cfg: ModelConfig, prompt_tokens: int, new_tokens: int, samples: int, *, is_episode: bool
) -> bool:
    """Return True if the samples of a prompt read its keys from one copy.

    False in batch-invariant numerics, whose softmax has one part; for episodes, whose rows need
    slots for their complete context; and where the cache would still have more than
    MOST_SHARED_CACHE of its size: two parts of attention then cost what they save.
    """
    if is_episode or samples < 2 or cfg.numerics == "invariant":
        return False
    shared_slots = prompt_tokens + samples * new_tokens
    return shared_slots <= MOST_SHARED_CACHE * samples * (prompt_tokens + new_tokens)


def prompt_slots(max_prompt_tokens: int) -> int:
    """Slots of a cache for the longest prompt: its tokens, rounded up."""
    return max(1, -(-max_prompt_tokens // MIN_PROMPT_TOKENS)) * MIN_PROMPT_TOKENS


def prompts_per_batch(max_rows: int, samples: int, shards: int) -> int:
    """Number of prompts of a batch: a multiple of the shards of rows, and at least one on each."""
    return max(shards, max_rows // samples // shards * shards)


def pad_tokens(
    rows: Sequence[Sequence[int] | np.ndarray], width: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of `width` rows, right-padded to one of few lengths, and their counts.

    Rows without a sequence have one padding token. They retain the shape of the last batch.
    """
    # Every length is a program of its own, so lengths are rounded up to a few.
    time = round_up_to_bucket(max(map(len, rows)), MIN_PROMPT_TOKENS)
    tokens = np.zeros((width, min(time, longest)), np.int32)
    lengths = np.ones(width, np.int32)
    for row, sequence in enumerate(rows):
        tokens[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    return tokens, lengths


def round_up_to_bucket(length: int, smallest: int) -> int:
    """Return `smallest` times a power of two, at least the length."""
    size = smallest
    while size < length:
        size *= 2
    return size
