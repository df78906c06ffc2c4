# SPDX-License-Identifier: Apache-2.0
"""The tokens that end an answer, as the JSON files of a checkpoint list them.

GPT-OSS lists three. The tokenizer's files name only two of them: <|endoftext|> is missing there.
Next: jaxmoe/data/tokenizer.py adds them to the tokenizer's own.
"""

from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json_object


def read_end_tokens(folder: Path) -> tuple[int, ...]:
    """Token ids in eos_token_id of generation_config.json, else of config.json; () without either.

    A file without eos_token_id, or with null, is as none.
    Raises: ConfigError if eos_token_id is neither a token id nor a list of token ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value: Any = parse_json_object(path.read_bytes()).get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
                raise ValueError(f"eos_token_id is {value!r:.60}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} must be JSON whose eos_token_id, if any, is a token id or a list of them; "
                f"{error}. Copy the file again from the original checkpoint."
            ) from error
        return tuple(dict.fromkeys(ids))
    return ()
