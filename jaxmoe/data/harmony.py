# SPDX-License-Identifier: Apache-2.0
"""Parse a response in harmony format: the final channel is the answer, analysis is reasoning.

Token ids decide, not text: a policy that spells "<|channel|>final" in plain tokens has not opened
a channel. Next: jaxmoe/data/scoring.py compares the answer with the stored one.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmoe.config import ConfigError
from jaxmoe.data.tokenizer import Tokenizer

_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_CONTENT_TYPE = re.compile(r"\s*[\w/+-]*\s*")  # json, code
_END_MARKS = ("<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True)
class ParsedResponse:
    """A response as reward functions receive it."""

    text: str  # of the final channel; the complete response if the prompt is not in harmony format
    analysis: str = ""
    uses_channels: bool = False  # True if the prompt is in harmony format
    has_final: bool = True  # False if the prompt uses channels and the response has no final one


def read_response(
    prompt: Sequence[int],
    response: Sequence[int],
    tokenizer: Tokenizer,
    *,
    stop: Sequence[int] = (),
) -> ParsedResponse:
    """Parse a response into the text of its last final message and its analysis.

    stop: the token that ended the response, if any. It is not part of the text, but a message
        that ends with <|call|> is a tool call, not an answer.

    A prompt uses channels if it ends inside an assistant message, as harmony prompts do
    (`<|start|>assistant`, with or without a header). After any other prompt, the complete
    response is the answer. A truncated final message counts as the answer.
    """
    ids = _special_ids(tokenizer)
    open_message = _find_open_message(prompt, ids, tokenizer)
    if open_message is None:
        return ParsedResponse(tokenizer.decode(response))
    messages = _parse_messages([*open_message, *response, *stop], ids, tokenizer)
    finals = [text for channel, text in messages if channel == "final"]
    analysis = "\n".join(text for channel, text in messages if channel == "analysis")
    return ParsedResponse(
        finals[-1] if finals else "", analysis, uses_channels=True, has_final=bool(finals)
    )


def answer_prefix(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Tokens to insert between a prompt and its answer: the header of the final channel, if any."""
    ids = _special_ids(tokenizer)
    open_message = _find_open_message(prompt, ids, tokenizer)
    if open_message is None:
        return []
    channel, message = ids["<|channel|>"], ids["<|message|>"]
    final = [channel, *tokenizer.encode("final"), message]
    if channel not in open_message and message not in open_message:
        return final
    message_mark = [] if message in open_message else [message]
    if _parse_messages([*open_message, *message_mark], ids, tokenizer) == [("final", "")]:
        return message_mark
    restart = [ids["<|start|>"], *tokenizer.encode("assistant"), *final]
    return [*message_mark, tokenizer.special("<|end|>"), *restart]


def _find_open_message(
    prompt: Sequence[int], ids: dict[str, int], tokenizer: Tokenizer
) -> list[int] | None:
    """The tokens of the assistant message that a prompt leaves open; None if there is none."""
    if not {"<|start|>", "<|channel|>", "<|message|>"} <= set(ids):
        return None
    ends = {ids[name] for name in _END_MARKS if name in ids}
    for i in range(len(prompt) - 1, -1, -1):
        if prompt[i] in ends:
            return None
        if prompt[i] == ids["<|start|>"]:
            open_message = list(prompt[i:])
            role = itertools.takewhile(lambda token: token not in ids.values(), open_message[1:])
            return open_message if tokenizer.decode(role).strip() == "assistant" else None
    return None


def _parse_messages(
    tokens: Sequence[int], ids: dict[str, int], tokenizer: Tokenizer
) -> list[tuple[str, str]]:
    """(channel, text) of each message; the channel is "" unless it is a well-formed assistant one.

    The header must be `<|start|>assistant<|channel|>NAME`, optionally with `<|constrain|>TYPE`.
    Messages to a tool, of another role, or ended by <|call|> also have the channel "".
    """
    marks = {i: name for name, i in ids.items() if name in _MARKS}
    ends = {ids[name] for name in _END_MARKS if name in ids}
    messages: list[tuple[str, str]] = []
    header: dict[str, list[int]] = {}
    current_mark = ""  # the last mark: following tokens belong to it
    # One more start mark closes the last message, which may be truncated.
    for token in [*tokens, ids["<|start|>"]]:
        mark = marks.get(token)
        if token in ends or mark == "<|start|>":
            if "<|message|>" in header:
                is_call = token == ids.get("<|call|>")
                channel = "" if is_call else _parse_channel(header, tokenizer)
                messages.append((channel, _message_text(header, tokenizer)))
            header, current_mark = {}, ""
        if mark is not None and mark not in header and "<|message|>" not in header:
            current_mark = mark
            header[mark] = []
        elif current_mark:
            header[current_mark].append(token)
    return messages


def _parse_channel(header: dict[str, list[int]], tokenizer: Tokenizer) -> str:
    role, channel, kind = (
        tokenizer.decode(header.get(m, [])) for m in ("<|start|>", "<|channel|>", "<|constrain|>")
    )
    order = [mark for mark in header if mark != "<|constrain|>"]
    well_formed = order == ["<|start|>", "<|channel|>", "<|message|>"]
    # A recipient makes it a tool call: "functions.NAME", "json to=functions.NAME".
    is_tool_call = _CONTENT_TYPE.fullmatch(kind) is None
    well_formed = well_formed and not is_tool_call
    return channel.strip() if well_formed and role.strip() == "assistant" else ""


def _message_text(header: dict[str, list[int]], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(header["<|message|>"])


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of harmony's special tokens, by name, as far as the tokenizer has them."""
    ids = {}
    for name in (*_MARKS, *_END_MARKS):
        try:
            ids[name] = tokenizer.special(name)
        except ConfigError:
            continue
    return ids
