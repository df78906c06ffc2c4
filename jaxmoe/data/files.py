# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from files, as one source of rows.

Next: jaxmoe/data/file_formats.py reads a file; jaxmoe/data/cells.py parses a record into a row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxmoe.answers import scoring
from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.column_names import name_columns
from jaxmoe.data.file_formats import read_records
from jaxmoe.data.rows import Row
from jaxmoe.data.task_files import list_task_files


@dataclass(frozen=True)
class FileSource:
    """Rows of a file, scored by text or number against the stored answer."""

    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    @property
    def digest(self) -> str:
        """Digest of all rows; equal for files with the same content in different places."""
        hasher = hashlib.sha256()
        for row in self.rows:
            hasher.update(row.content.encode())
        return hasher.hexdigest()[:16]

    def score(self, response: str, index: int) -> float:
        row = self.rows[index]
        return max(
            scoring.score_text(response, gold) for gold in (row.answer or "", *row.other_answers)
        )


def read_task_rows(
    task: str | Sequence[str], *, answers: bool = True, columns: Mapping[str, str] | None = None
) -> tuple[Row, ...]:
    """All rows of a file, a folder, a glob pattern, or "package:NAME/path/in/it".

    task: one of these, or a list of them, whose rows are concatenated; the rows of a file that is
        named twice come once.
    answers: True if each row must have an answer to compare with.
    columns: the file's names of its question, answer and system columns, where it has other ones.
    Raises: ConfigError if no file exists, the files hold no rows, or a row is malformed.
    """
    paths = list_task_files(task).paths
    rows = tuple(
        read_row(location, name_columns(location, record, columns or {}), answers=answers)
        for path in paths
        for location, record in read_records(path)
    )
    if not rows:
        names = ", ".join(map(str, paths[:3]))
        raise ConfigError(f"data.task must have rows; {names} is empty. Try another file.")
    return rows
