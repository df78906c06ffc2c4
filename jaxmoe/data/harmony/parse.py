# SPDX-License-Identifier: Apache-2.0
"""Parse what the policy wrote in harmony format: messages, tool calls, and the answer.

Token ids decide, not text: a policy that spells "<|channel|>final" in plain tokens has not opened
a channel. Next: jaxmoe/data/harmony/render.py writes messages.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.header import CHANNEL, CONSTRAIN, HeaderError, check_role, parse_header
from jaxmoe.data.rows import Message
from jaxmoe.data.tokenizer import Tokenizer

START, MESSAGE = "<|start|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE)
_END_MARKS = (END, RETURN, CALL)


@dataclass(frozen=True)
class ParsedResponse:
    """A response as reward functions receive it."""

    text: str  # of the final channel; the complete response if the prompt is not in harmony format
    analysis: str = ""
    uses_channels: bool = False  # True if the prompt is in harmony format
    has_final: bool = True  # False if the prompt uses channels and the response has no final one


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy as messages, up to the first problem."""

    messages: tuple[Message, ...]
    ends: tuple[str, ...] = ()  # the mark that ends each message; "" for one that is cut off
    problem: str = ""  # one phrase; "" if the turn is well-formed
    is_forged: bool = False  # the problem is a message in the name of another role
    is_truncated: bool = False  # the problem is that the last message or its header is cut off

    @property
    def calls(self) -> tuple[Message, ...]:
        """The complete tool calls, in order; empty if the turn is malformed or truncated.

        A message is a call if it has a recipient, on whatever channel, or ends with <|call|>. One
        that ends with <|call|> and names no tool has an empty recipient.
        """
        pairs = zip(self.messages, self.ends, strict=True)
        return () if self.problem else tuple(m for m, end in pairs if _is_call(m, end))

    @property
    def answer(self) -> Message | None:
        """The last final message; None if the turn ends in a call or is malformed.

        A truncated final message is an answer.
        """
        if self.problem and not self.is_truncated:
            return None
        return _find_answer(list(zip(self.messages, self.ends, strict=True)))


def read_turn(context: Sequence[int], turn: Sequence[int], tokenizer: Tokenizer) -> ParsedTurn:
    """Parse what the policy sampled in one turn, its stop token included. Never raises.

    context: the tokens before the turn, or the last of them: an assistant message that they leave
        open, as in `<|start|>assistant`, belongs to the turn.

    Messages are those of oss-harmony's strict parser. A body ends at <|end|>, <|return|> or
    <|call|> only, so a <|start|> inside a body is text, and so is an end mark inside a header.
    The differences are:
    - The turn ends at the first message of another role than the assistant.
    - Marks that are spelt in plain tokens, and U+FFFD, make a header malformed.
    - `<|constrain|>` is left out of content types and recipients, see `parse_header`.
    - A turn that is cut off is reported as truncated. Its partial last message is returned.
    - A last token that stops the policy and is no end mark, such as <|endoftext|>, is left out.
    """
    ids = _special_ids(tokenizer)
    open_message = _find_open_message(context, ids, tokenizer)
    if open_message is None:
        return ParsedTurn((), problem="no assistant message is open")
    messages: list[Message] = []
    ends: list[str] = []
    for part in _split_messages(open_message, turn, ids, tokenizer):
        if part.message is not None:
            messages.append(part.message)
            ends.append(part.end)
        if part.problem:
            return ParsedTurn(
                tuple(messages), tuple(ends), part.problem, part.is_forged, part.is_truncated
            )
    return ParsedTurn(tuple(messages), tuple(ends))


def read_reply(ids: Sequence[int], tokenizer: Tokenizer) -> list[Message] | None:
    """Parse the messages that `write_messages` wrote; return None for anything else.

    The opening of the assistant's next turn at the end is no message.
    """
    marks = _special_ids(tokenizer)
    if not {START, CHANNEL, MESSAGE, END} <= set(marks):
        return None
    tokens, messages = list(map(int, ids)), list[Message]()
    starts = [i for i, token in enumerate(tokens) if token == marks[START]]
    if starts[:1] != [0] or tokenizer.decode(tokens[starts[-1] + 1 :]) != "assistant":
        return None
    for start, next_start in itertools.pairwise(starts):
        part = tokens[start + 1 : next_start]
        if marks[MESSAGE] not in part or part[-1] not in {marks.get(m) for m in (END, CALL)}:
            return None
        split = part.index(marks[MESSAGE])
        try:
            messages.append(_parse_written(part[:split], part[split + 1 : -1], marks, tokenizer))
        except HeaderError:
            return None
    return messages


def _parse_written(
    header: list[int], body: list[int], marks: dict[str, int], tokenizer: Tokenizer
) -> Message:
    text = _decode_header(header, marks, tokenizer)
    author = text.replace(CHANNEL, " ").partition(" ")[0]
    parsed = parse_header(text.removeprefix(author), has_role=True)
    role, _, name = author.partition(":")
    if role not in ("system", "developer", "user", "assistant"):
        role, name = "tool", author
    return replace(parsed, role=role, name=name, content=tokenizer.decode(body))


def opens_message(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """True if a prompt ends inside a message of the assistant, as harmony prompts do."""
    return _find_open_message(prompt, _special_ids(tokenizer), tokenizer) is not None


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
    response is the answer. A truncated final message counts as the answer. A malformed message is
    not an answer, but does not take away that of another message, as it would in an episode. A
    response that ends in a tool call has no answer.
    """
    ids = _special_ids(tokenizer)
    open_message = _find_open_message(prompt, ids, tokenizer)
    if open_message is None:
        return ParsedResponse(tokenizer.decode(response))
    parts = _split_messages(open_message, [*response, *stop], ids, tokenizer)
    messages = [(part.message, part.end) for part in parts if part.message is not None]
    analysis = [
        m.content for m, end in messages if m.channel == "analysis" and not _is_call(m, end)
    ]
    final = _find_answer(messages)
    return ParsedResponse(
        final.content if final else "",
        "\n".join(analysis),
        uses_channels=True,
        has_final=final is not None,
    )


def answer_prefix(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Tokens to insert between a prompt and its answer: the header of the final channel, if any."""
    ids = _special_ids(tokenizer)
    open_message = _find_open_message(prompt, ids, tokenizer)
    if open_message is None:
        return []
    channel, message = ids[CHANNEL], ids[MESSAGE]
    final = [channel, *tokenizer.encode("final"), message]
    if tokenizer.decode(open_message).strip() == "assistant":
        return final
    message_mark = [] if message in open_message else [message]
    (part,) = _split_messages([*open_message, *message_mark], [], ids, tokenizer)
    if part.message == Message("assistant", "", channel="final"):
        return message_mark
    restart = [ids[START], *tokenizer.encode("assistant"), *final]
    return [*message_mark, tokenizer.special(END), *restart]


@dataclass(frozen=True)
class _Part:
    """A message of a turn, or a problem, or a partial message and the problem that it is cut."""

    message: Message | None
    end: str = ""
    problem: str = ""
    is_forged: bool = False
    is_truncated: bool = False


def _is_call(message: Message, end: str) -> bool:
    return bool(message.recipient) or end == CALL


def _find_answer(messages: Sequence[tuple[Message, str]]) -> Message | None:
    if messages and _is_call(*messages[-1]):
        return None
    finals = [m for m, end in messages if m.channel == "final" and not _is_call(m, end)]
    return finals[-1] if finals else None


def _find_open_message(
    context: Sequence[int], ids: dict[str, int], tokenizer: Tokenizer
) -> list[int] | None:
    """Tokens of the assistant message that a context leaves open, from its role on; or None."""
    if not {START, CHANNEL, MESSAGE} <= set(ids):
        return None
    ends = {ids[name] for name in _END_MARKS if name in ids}
    for i in range(len(context) - 1, -1, -1):
        if context[i] in ends:
            return None
        if context[i] == ids[START]:
            open_message = [int(token) for token in context[i + 1 :]]
            text = itertools.takewhile(lambda token: token not in ids.values(), open_message)
            role = tokenizer.decode(text).split()[:1]
            return open_message if role == ["assistant"] else None
    return None


def _split_messages(
    open_message: Sequence[int], turn: Sequence[int], ids: dict[str, int], tokenizer: Tokenizer
) -> Iterator[_Part]:
    """The messages and problems of a turn, in order.

    open_message: what the context has of the first message, from its role on.
    """
    tokens = [*open_message, *map(int, turn)]
    ends = {ids[name]: name for name in _END_MARKS if name in ids}
    if len(turn) and tokens[-1] in tokenizer.stop_ids and tokens[-1] not in ends:
        del tokens[-1]
    header: list[int] | None = []  # None between two messages
    body: list[int] | None = None  # None inside a header and between two messages
    has_role = True  # the context wrote the role of the first message
    is_stray = False
    for token in tokens:
        if header is None:
            if token == ids[START]:
                header, has_role, is_stray = [], False, False
            elif not is_stray:
                is_stray = True
                yield _Part(None, problem=f"a token between two messages that is not {START}")
        elif body is None:
            if token == ids[MESSAGE]:
                body = []
            else:
                header.append(token)
        elif token in ends:
            yield _parse_message(header, body, ends[token], has_role, ids, tokenizer)
            header = body = None
        else:
            body.append(token)
    if header is not None:
        if body is None:
            yield _parse_cut_header(header, has_role, tokenizer)
        else:
            yield _parse_message(header, body, "", has_role, ids, tokenizer)


def _parse_message(
    header: list[int],
    body: list[int],
    end: str,
    has_role: bool,
    ids: dict[str, int],
    tokenizer: Tokenizer,
) -> _Part:
    try:
        text = _decode_header(header, ids, tokenizer)
        if has_role:
            text = text.lstrip().removeprefix("assistant")
        message = replace(parse_header(text, has_role=has_role), content=tokenizer.decode(body))
    except HeaderError as error:
        return _Part(None, problem=str(error), is_forged=error.is_forged)
    if not end:
        return _Part(message, problem="the last message has no end mark", is_truncated=True)
    return _Part(message, end)


def _decode_header(header: list[int], ids: dict[str, int], tokenizer: Tokenizer) -> str:
    text = tokenizer.decode(header)
    if "\ufffd" in text or not all(0 <= token < tokenizer.vocab_size for token in header):
        raise HeaderError("a header that is not text")
    # A mark counts as one only if it is the special token, and not if it is spelt in plain ones.
    for name in (CHANNEL, CONSTRAIN):
        if text.count(name) != (header.count(ids[name]) if name in ids else 0):
            raise HeaderError(f"{name} in plain tokens in a header")
    return text


def _parse_cut_header(header: list[int], has_role: bool, tokenizer: Tokenizer) -> _Part:
    role, *later_parts = tokenizer.decode(header).replace("<|", " <|").split() or [""]
    try:
        if not has_role:
            check_role(role, is_cut=not later_parts)
    except HeaderError as error:
        if error.is_forged:
            return _Part(None, problem=str(error), is_forged=True)
    return _Part(None, problem="the turn ends inside a header", is_truncated=True)


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of harmony's special tokens, by name, as far as the tokenizer has them."""
    ids = {}
    for name in (*_MARKS, *_END_MARKS):
        try:
            ids[name] = tokenizer.special(name)
        except ConfigError:
            continue
    return ids
