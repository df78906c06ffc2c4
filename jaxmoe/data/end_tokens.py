# SPDX-License-Identifier: Apache-2.0
"""The tokens that end an answer, as a checkpoint's generation_config.json lists them.

GPT-OSS names three, of which a tokenizer alone tells two: a model may also end by <|endoftext|>.
Next: jaxmoe/data/tokenizer.py adds them to its own.
"""

from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json_object


def end_tokens(folder: Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, or of config.json where there is no such file.

    Raises ConfigError where it is neither a token's id nor a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value: Any = parse_json_object(path.read_bytes()).get("eos_token_id")
            ids = [] if value is None else value if isinstance(value, list) else [value]
            if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
                raise ValueError(f"eos_token_id is {value!r:.60}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} must be JSON that may list eos_token_id, the ids that end an answer; "
                f"{error}. Copy it anew from where the checkpoint came from."
            ) from error
        return tuple(dict.fromkeys(ids))
    return ()
