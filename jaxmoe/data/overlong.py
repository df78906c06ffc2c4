# SPDX-License-Identifier: Apache-2.0
"""Rows whose prompt is longer than data.max_prompt_tokens: left out, and counted.

Rows of a file are measured before they are split, so a resumed run leaves out the same ones.
Next: jaxmoe/data/sources.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxmoe.data.rows import Row


@dataclass(frozen=True)
class Overlong:
    """Measures rows, and remembers which it left out."""

    tokens: Callable[[Row], int]  # of a row's prompt
    limit: int
    dropped: set[str] = field(default_factory=set)  # identities of rows

    def keeps(self, row: Row) -> bool:
        """True where a row's prompt fits. A row that does not is counted once."""
        if self.tokens(row) <= self.limit:
            return True
        self.dropped.add(row.identity)
        return False

    def __str__(self) -> str:
        return (
            f"{len(self.dropped):,} prompts longer than data.max_prompt_tokens ({self.limit}) "
            "dropped"
        )
