# SPDX-License-Identifier: Apache-2.0
"""Write messages in harmony format, with the tokens that oss-harmony writes.

Marks become special ids. Names and contents become plain ids, even if they contain the text of a
special token. Next: jaxmoe/data/harmony/tools.py declares tools to the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.header import CHANNEL, CONSTRAIN
from jaxmoe.data.harmony.parse import CALL, END, MESSAGE, RETURN, START
from jaxmoe.data.rows import Message
from jaxmoe.data.tokenizer import Tokenizer

# (text, True if it is markup); each piece is encoded on its own
Piece = tuple[str, bool]
_ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT_OPENING: tuple[Piece, ...] = ((START, True), ("assistant", False))


def write_messages(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Tokens of messages that the policy reads, and of the opening of its next turn.

    The result ends in `<|start|>assistant`. A message of the assistant ends with <|call|> if it has
    a recipient, else with <|end|>, a final one too: it is history. A message of a tool needs its
    name; its recipient is the assistant unless it has another, and its channel is that of the
    tool's calls.
    Raises: ConfigError for a message of a tool without a name, and for an unknown role.
    """
    pieces = [*message_pieces(messages), *ASSISTANT_OPENING]
    return encode_pieces(pieces, tokenizer)


def write_turn(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Tokens of a turn of the policy after a context that ends in `<|start|>assistant`.

    They are what a demonstration trains on, and `read_turn` reads the messages from them. The last
    message ends with <|call|> if it has a recipient, else with <|return|>.
    Raises: ValueError without messages, or for a message of another role than the assistant.
    """
    if not messages or any(m.role != "assistant" or m.name for m in messages):
        raise ValueError("a turn of the policy must consist of messages of the assistant")
    pieces = message_pieces(messages)[len(ASSISTANT_OPENING) :]
    if pieces[-1] == (END, True):
        pieces[-1] = (RETURN, True)
    return encode_pieces(pieces, tokenizer)


def message_pieces(messages: Sequence[Message]) -> list[Piece]:
    """The pieces of messages, each with its end mark."""
    return [piece for message in messages for piece in _message_pieces(_complete_message(message))]


def drop_analysis(messages: Sequence[Message]) -> list[Message]:
    """Leave the analysis channel out before the last final message, as GPT-OSS is served."""
    finals = [i for i, message in enumerate(messages) if message.channel == "final"]
    last = finals[-1] if finals else 0
    return [m for i, m in enumerate(messages) if i >= last or m.channel != "analysis"]


def encode_pieces(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[int]:
    """Encode pieces: markup into special ids, everything else into plain ids."""
    return [i for text, markup in pieces if text for i in tokenizer.encode(text, specials=markup)]


def _message_pieces(message: Message) -> Iterator[Piece]:
    yield START, True
    if message.role == "tool":
        yield message.name, False
    else:
        yield message.role, False
        if message.name:
            yield f":{message.name}", False
    has_recipient = message.recipient not in ("", "all")
    recipient = f" to={message.recipient}" if has_recipient else ""
    # As the model itself writes calls of functions.
    is_behind = message.channel == "commentary"
    if not is_behind:
        yield recipient, False
    if message.channel:
        yield CHANNEL, True
        yield message.channel, False
    if is_behind:
        yield recipient, False
    if message.content_type:
        yield " ", False
        yield CONSTRAIN, True
        yield message.content_type.removeprefix(CONSTRAIN), False
    yield MESSAGE, True
    yield message.content, False
    yield CALL if message.role == "assistant" and message.recipient else END, True


def _complete_message(message: Message) -> Message:
    """Add the recipient and channel of a tool's message; raise ConfigError if it has no author."""
    if message.role not in _ROLES:
        raise ConfigError(
            f"the role of a message must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}; got "
            f"{message.role!r:.40}."
        )
    if message.role != "tool":
        return message
    if not message.name:
        raise ConfigError(
            "a message of a tool must have the name of the tool, such as python or "
            f"functions.search; {message.content!r:.40} has none."
        )
    channel = "commentary" if message.name.startswith("functions.") else "analysis"
    return replace(
        message, recipient=message.recipient or "assistant", channel=message.channel or channel
    )
