# SPDX-License-Identifier: Apache-2.0
"""Transcripts of episodes: each message with its author and recipient.

Turns and replies are parsed from their token ids, as an environment receives them. What is no
message in harmony format is one raw text.
Next: jaxmoe/observe/samples_page.py displays them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxmoe.data.harmony.parse import CALL, ParsedTurn, opens_message, read_reply, read_turn
from jaxmoe.data.rows import Message
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.records import Rollout

POLICY, ENVIRONMENT = "policy", "environment"


class EpisodePart(NamedTuple):
    """A turn or a reply: tokens [start, end) of a rollout."""

    start: int
    end: int
    is_policy: bool


class TranscriptEntry(NamedTuple):
    """A text of an episode."""

    writer: str  # POLICY or ENVIRONMENT: who wrote the tokens
    speaker: str  # such as "assistant to python"; "" for a raw text
    text: str


def list_parts(rollout: Rollout) -> list[EpisodePart]:
    """Turns and replies of a rollout, in order."""
    parts, last_end = list[EpisodePart](), 0
    for start, end in rollout.turns:
        if start > last_end:
            parts.append(EpisodePart(last_end, start, is_policy=False))
        parts.append(EpisodePart(start, end, is_policy=True))
        last_end = end
    return parts


def make_transcript(rollout: Rollout, tokenizer: Tokenizer) -> list[TranscriptEntry]:
    """The messages of a rollout; [] for a single answer to a prompt that is not in harmony format.

    A turn that is malformed is one entry with its raw text. A last message that is cut off is an
    entry like others.
    """
    is_single = rollout.n_sampled == len(rollout.tokens)
    if is_single and not opens_message(rollout.prompt.tokens, tokenizer):
        return []
    return [
        entry for part in list_parts(rollout) for entry in _list_entries(rollout, part, tokenizer)
    ]


def read_last_turn(rollout: Rollout, tokenizer: Tokenizer) -> ParsedTurn:
    """Parse the last turn of the policy."""
    return read_turn(*_split_at(rollout, list_parts(rollout)[-1]), tokenizer)


def _list_entries(
    rollout: Rollout, part: EpisodePart, tokenizer: Tokenizer
) -> Iterator[TranscriptEntry]:
    context, ids = _split_at(rollout, part)
    raw = tokenizer.decode(ids)
    if not part.is_policy:
        if part.start in rollout.context_starts:
            yield TranscriptEntry(ENVIRONMENT, "new context", f"{len(ids)} tokens")
        messages = read_reply(ids, tokenizer)
        if messages is None:
            yield TranscriptEntry(ENVIRONMENT, "", raw)
        else:
            yield from (TranscriptEntry(ENVIRONMENT, name_speaker(m), m.content) for m in messages)
        return
    turn = read_turn(context, ids, tokenizer)
    # A message that is cut off in its content has no end mark. In its header, it is no message.
    if turn.problem and not (turn.is_truncated and turn.ends[-1:] == ("",)):
        yield TranscriptEntry(POLICY, "", raw)
        return
    for message, end in zip(turn.messages, turn.ends, strict=True):
        is_nameless = end == CALL and not message.recipient
        speaker = "assistant to no tool" if is_nameless else name_speaker(message)
        yield TranscriptEntry(POLICY, speaker, message.content)


def _split_at(rollout: Rollout, part: EpisodePart) -> tuple[list[int], list[int]]:
    """The tokens before a turn or reply, and its own."""
    return rollout.context_before(part.start), rollout.tokens[part.start : part.end].tolist()


def name_speaker(message: Message) -> str:
    """The author of a message, its recipient, and its channel unless that is clear."""
    if message.role == "tool":
        author = message.name
    else:
        author = f"{message.role}:{message.name}" if message.name else message.role
    if message.recipient not in ("", "all", "assistant"):
        return f"{author} to {message.recipient}"
    is_aside = message.role == "assistant" and message.channel not in ("", "final")
    return f"{author} ({message.channel})" if is_aside else author
