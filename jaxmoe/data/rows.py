# SPDX-License-Identifier: Apache-2.0
"""A question, and what every source of questions offers.

A source is random access: row i is a pure function of (task, options, seed, size, i), so a
resumed run or another process sees the same rows. Next: jaxmoe/data/sources.py opens them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str  # "user" or "assistant"
    content: str


@dataclass(frozen=True)
class Row:
    """One question; the answer is None where only a checker exists."""

    question: str  # of a chat: its last turn
    answer: str | None
    others: tuple[str, ...] = ()  # further answers that are as right
    system: str = ""  # the row's own system prompt
    earlier: tuple[Message, ...] = ()  # turns of a chat before the question
    columns: Mapping[str, Any] = field(default_factory=dict)  # all that its file says of it
    where: str = ""  # "file:line", where it is from a file
    chat: bool = False  # whether its file has a chat, and not a plain text

    @property
    def identity(self) -> str:
        """Equal for rows that ask the same: no two of them, one trained on and one held out."""
        asked = self.question.strip()
        if not self.system and not self.earlier:
            return asked
        return repr((self.system, [(m.role, m.content) for m in self.earlier], asked))


@runtime_checkable
class Source(Protocol):
    """Rows by index, and their scorer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def score(self, response: str, index: int) -> float:
        """1.0 where the response solves row `index`, else 0.0; never raises on a response."""
        ...


@dataclass(frozen=True)
class Subset:
    """Some rows of a source, in a given order; `indices` may be computed when read."""

    source: Source
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.source[self.indices[index]]

    def score(self, response: str, index: int) -> float:
        return self.source.score(response, self.indices[index])
