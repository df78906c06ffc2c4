# SPDX-License-Identifier: Apache-2.0
"""Drop and count rows whose prompt is longer than data.max_prompt_tokens.

Rows of a file are filtered before the split, so a resumed run drops the same ones.
Next: jaxmoe/data/sources.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxmoe.data.rows import Row


@dataclass(frozen=True)
class PromptLengthFilter:
    """Tests the prompt length of rows, and records the rows that it drops."""

    count_tokens: Callable[[Row], int]  # of a row's prompt
    limit: int  # tokens
    dropped: set[str] = field(default_factory=set)  # "file:line", else the question, of each row

    def accepts(self, row: Row) -> bool:
        """True if a row's prompt fits. A row that does not fit is recorded once."""
        if self.count_tokens(row) <= self.limit:
            return True
        self.dropped.add(row.location or row.identity)
        return False

    def __str__(self) -> str:
        return (
            f"{len(self.dropped):,} prompts longer than data.max_prompt_tokens ({self.limit}) "
            "dropped"
        )
