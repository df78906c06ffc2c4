# SPDX-License-Identifier: Apache-2.0
"""`data.columns`: a file's own names of its question, answer and system columns.

Next: jaxmoe/data/cells.py parses the columns under their usual names.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from jaxmoe.config import ConfigError

# Columns that would be read before the one with the usual name.
_READ_BEFORE = {"question": ("prompt",), "answer": ("reward_model",), "system": ()}


def name_columns(location: str, record: Any, names: Mapping[str, str]) -> Any:
    """The record with the named columns under their usual names too.

    A column that would be read instead is left out: the user has said which one to read.

    names: the file's names by the usual ones, such as {"question": "problem"}; empty: no change.
    location: "file:line", for error messages.
    Raises: ConfigError if a record has no column of a name.
    """
    if not names or not isinstance(record, dict):  # read_row refuses what is no object
        return record
    for name, column in names.items():
        if column not in record:
            close = difflib.get_close_matches(column, map(str, record), 1, cutoff=0.4)
            example = close[0] if close else "ANOTHER_COLUMN"
            raise ConfigError(
                f"{location} must have the column {column!r} that data.columns names for the "
                f"{name}; it has {', '.join(map(str, record)) or 'none'}. "
                f"Try --set 'data.columns.{name}={example}'"
            )
    replaced = {column for name in names for column in _READ_BEFORE[name]}
    remaining = {column: value for column, value in record.items() if column not in replaced}
    return remaining | {name: record[column] for name, column in names.items()}
