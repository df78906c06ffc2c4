# SPDX-License-Identifier: Apache-2.0
"""A question (`Row`), and the protocol of every source of questions.

Sources have random access: row i is a pure function of (task, options, seed, size, i), so a
resumed run or another process sees the same rows. Next: jaxmoe/data/sources.py opens them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Message:
    """One message of a conversation. The fields after the content are of harmony."""

    role: str  # "user" or "assistant"; in harmony "system", "developer" and "tool" too
    content: str
    name: str = ""  # of the tool that wrote it, such as "python" or "functions.search"
    channel: str = ""  # "analysis", "commentary" or "final"; of messages by the policy and by tools
    recipient: str = ""  # of a call: the tool that is called; of a tool's message: "assistant"
    content_type: str = ""  # "code" or "json", without the <|constrain|> before it

    @property
    def is_plain(self) -> bool:
        """True if role and content are all of the message, as formats other than harmony need."""
        is_final = self.role != "tool" and self.channel in ("", "final")
        return is_final and not (self.name or self.recipient or self.content_type)

    @property
    def identity(self) -> tuple[str, ...]:
        """Role and content; of a message that is not plain, all fields."""
        fields = (self.name, self.channel, self.recipient, self.content_type)
        return (self.role, self.content, *(() if self.is_plain else fields))


@dataclass(frozen=True)
class ToolDescription:
    """A tool as a prompt declares it."""

    # Calls of "search" have the recipient "functions.search". Calls of "python" have the recipient
    # "python", and their content is code.
    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of type "object"; empty if it takes none


@dataclass(frozen=True)
class Row:
    """One question; the answer is None if only a checker can judge responses."""

    question: str  # of a chat, its last turn
    answer: str | None
    other_answers: tuple[str, ...] = ()  # further correct answers
    system: str = ""  # the row's own system prompt
    earlier: tuple[Message, ...] = ()  # turns of a chat before the question
    columns: Mapping[str, Any] = field(default_factory=dict)  # the complete record of its file
    location: str = ""  # "file:line" of a row that was read from a file
    tools: tuple[ToolDescription, ...] = ()  # that the row declares
    chat: bool = False  # True if the file stores a chat, not a plain text

    @property
    def question_text(self) -> str:
        """The turns of the chat up to the question: equal for rows that ask the same.

        Outer white space and the system prompt do not count, since they leave the answer the same.
        """
        question = self.question.strip()
        return repr(([m.identity for m in self.earlier], question)) if self.earlier else question

    @property
    def identity(self) -> str:
        """The system prompt, if there is one, and what is asked."""
        if not self.system and not self.earlier:
            return self.question_text
        return repr((self.system, [m.identity for m in self.earlier], self.question.strip()))

    @property
    def content(self) -> str:
        """A text that is equal for rows with the same content in all columns."""
        turns = [turn.identity for turn in self.earlier]
        content = [
            self.question,
            self.answer,
            self.other_answers,
            self.system,
            turns,
            dict(self.columns),
        ]
        # Columns of a parquet file may hold dates and other values that JSON has no form for.
        return json.dumps(content, sort_keys=True, default=repr)


def prompt_messages(row: Row, system: str = "") -> list[Message]:
    """The row's own messages: its system prompt, else `system`, earlier turns, the question."""
    text = row.system or system
    first = [Message("system", text)] if text else []
    return [*first, *row.earlier, Message("user", row.question)]


@runtime_checkable
class Source(Protocol):
    """Rows by index, and their scorer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def score(self, response: str, index: int) -> float:
        """1.0 if the response solves row `index`, else 0.0; never raises for any response."""
        ...


@dataclass(frozen=True)
class Subset:
    """Selected rows of a source, in the order of `indices`, which may be computed lazily."""

    source: Source
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.source[self.indices[index]]

    def score(self, response: str, index: int) -> float:
        return self.source.score(response, self.indices[index])


@dataclass(frozen=True)
class MappedRows:
    """A source whose rows are changed by a function when they are read; its scorer stays."""

    source: Source
    function: Callable[[Row], Row]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Row:
        return self.function(self.source[index])

    def score(self, response: str, index: int) -> float:
        return self.source.score(response, index)


@dataclass(frozen=True)
class LockedRows:
    """A source that several threads may read."""

    source: Source
    lock: Lock = field(default_factory=Lock)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Row:
        with self.lock:
            return self.source[index]

    def score(self, response: str, index: int) -> float:
        with self.lock:
            return self.source.score(response, index)
