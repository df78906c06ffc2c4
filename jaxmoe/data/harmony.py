# SPDX-License-Identifier: Apache-2.0
"""What the policy said, by channels: only the final one is an answer, analysis is thinking aloud.

Token ids decide, not text: a policy that spells "<|channel|>final" in plain tokens has opened no
channel. Next: jaxmoe/data/scoring.py compares the answer with the stored one.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmoe.config import ConfigError
from jaxmoe.data.tokenizer import Tokenizer

_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_CONTENT_TYPE = re.compile(r"\s*[\w/+-]*\s*")  # json, code
_ENDS = ("<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True)
class Spoken:
    """A response as rewards see it."""

    text: str  # the final channel's, or all of it where the prompt asks for no channels
    analysis: str = ""
    channels: bool = False  # whether it was asked for
    final: bool = True  # whether there is an answer at all


def read_response(
    prompt: Sequence[int],
    response: Sequence[int],
    tokenizer: Tokenizer,
    *,
    stop: Sequence[int] = (),
) -> Spoken:
    """The last message in the final channel, and the analysis beside it.

    stop: the token that ended the response, where one did; it is no part of the text, but a
        message that <|call|> ends is a call and no answer.

    Channels are there where the prompt ends inside a message of the assistant, as harmony's do
    (`<|start|>assistant`, with or without a header); any other response is its own answer.
    An answer cut short counts as far as it goes.
    """
    ids = _ids(tokenizer)
    opened = _opened(prompt, ids, tokenizer)
    if opened is None:
        return Spoken(tokenizer.decode(response))
    messages = _messages([*opened, *response, *stop], ids, tokenizer)
    finals = [text for channel, text in messages if channel == "final"]
    analysis = "\n".join(text for channel, text in messages if channel == "analysis")
    return Spoken(finals[-1] if finals else "", analysis, channels=True, final=bool(finals))


def answer_opening(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """What stands between a prompt and its answer: the header of the final channel, if any."""
    ids = _ids(tokenizer)
    opened = _opened(prompt, ids, tokenizer)
    if opened is None:
        return []
    channel, message = ids["<|channel|>"], ids["<|message|>"]
    final = [channel, *tokenizer.encode("final"), message]
    if channel not in opened and message not in opened:
        return final
    rest = [] if message in opened else [message]
    if _messages([*opened, *rest], ids, tokenizer) == [("final", "")]:
        return rest
    again = [ids["<|start|>"], *tokenizer.encode("assistant"), *final]
    return [*rest, tokenizer.special("<|end|>"), *again]


def _opened(prompt: Sequence[int], ids: dict[str, int], tokenizer: Tokenizer) -> list[int] | None:
    """The tokens of the assistant's message that a prompt leaves open; None where none."""
    if not {"<|start|>", "<|channel|>", "<|message|>"} <= set(ids):
        return None
    ends = {ids[name] for name in _ENDS if name in ids}
    for i in range(len(prompt) - 1, -1, -1):
        if prompt[i] in ends:
            return None
        if prompt[i] == ids["<|start|>"]:
            opened = list(prompt[i:])
            role = itertools.takewhile(lambda token: token not in ids.values(), opened[1:])
            return opened if tokenizer.decode(role).strip() == "assistant" else None
    return None


def _messages(
    tokens: Sequence[int], ids: dict[str, int], tokenizer: Tokenizer
) -> list[tuple[str, str]]:
    """(channel, text) of the assistant's messages; "" for a header that is malformed.

    Header: `<|start|>assistant<|channel|>NAME`, `<|constrain|>TYPE` where there is one. A message
    to a tool, or of another role, is none of these; nor is one that <|call|> ends, on whatever
    channel the model put it.
    """
    marks = {i: name for name, i in ids.items() if name in _MARKS}
    ends = {ids[name] for name in _ENDS if name in ids}
    messages: list[tuple[str, str]] = []
    header: dict[str, list[int]] = {}
    place = ""  # the mark we are behind
    for token in [*tokens, ids["<|start|>"]]:
        mark = marks.get(token)
        if token in ends or mark == "<|start|>":
            if "<|message|>" in header:
                called = token == ids.get("<|call|>")
                channel = "" if called else _channel(header, tokenizer)
                messages.append((channel, _text(header, tokenizer)))
            header, place = {}, ""
        if mark is not None and mark not in header and "<|message|>" not in header:
            place = mark
            header[mark] = []
        elif place:
            header[place].append(token)
    return messages


def _channel(header: dict[str, list[int]], tokenizer: Tokenizer) -> str:
    role, channel, kind = (
        tokenizer.decode(header.get(m, [])) for m in ("<|start|>", "<|channel|>", "<|constrain|>")
    )
    order = [mark for mark in header if mark != "<|constrain|>"]
    well_formed = order == ["<|start|>", "<|channel|>", "<|message|>"]
    to_a_tool = _CONTENT_TYPE.fullmatch(kind) is None  # "functions.NAME", "json to=functions.NAME"
    well_formed = well_formed and not to_a_tool
    return channel.strip() if well_formed and role.strip() == "assistant" else ""


def _text(header: dict[str, list[int]], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(header["<|message|>"])


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Of those of harmony's specials that the tokenizer has."""
    found = {}
    for name in (*_MARKS, *_ENDS):
        try:
            found[name] = tokenizer.special(name)
        except ConfigError:
            continue
    return found
