# SPDX-License-Identifier: Apache-2.0
"""A question, and what every source of questions offers.

A source is random access: row i is a pure function of (task, options, seed, size, i), so a
resumed run or another process sees the same rows. Next: jaxmoe/data/sources.py opens them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Row:
    """One question; the answer is None where only a checker exists."""

    question: str
    answer: str | None


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
