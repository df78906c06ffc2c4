# SPDX-License-Identifier: Apache-2.0
"""What is asked, how it is put, and what answers earn. Next: jaxmoe/data/files.py reads rows."""

from dataclasses import dataclass, field
from typing import Any

from jaxmoe.config.errors import numbers, require

EFFORTS = ("low", "medium", "high")
OVERLONG = ("refuse", "drop")


@dataclass(frozen=True)
class DataConfig:
    """Prompts with checkable answers."""

    task: str  # "reasoning_gym:NAME", a .jsonl/.parquet file, or "package:NAME/path/in/it"
    options: dict[str, Any] = field(default_factory=dict)  # for reasoning_gym tasks
    # "{question}" in a text of yours, "chat" (the tokenizer's chat template) or "harmony"
    # (GPT-OSS's own format); auto: chat for rows that are chats, and the bare text of others
    template: str = "auto"
    system: str = ""  # system prompt of rows without their own; the template's {system}
    reasoning_effort: str = "medium"  # harmony's: low, medium or high
    rewards: str = ""  # "0.9 * module:function(option=1) + 0.1 * …"; empty: the task's own scorer
    reward_timeout_s: float = 300.0  # of a call of these, in their process; 0: here, without limit
    train_rows: int = 4096
    held_out_rows: int = 256
    max_prompt_tokens: int = 512
    overlong_prompts: str = "refuse"  # stop at a longer prompt; or "drop", leave its row out

    def __post_init__(self) -> None:
        numbers(
            "data", self, max_prompt_tokens=("above 0", lambda x: x > 0, 512),
            reward_timeout_s=("0 or more, and finite", lambda x: 0 <= x < 1e9, 300.0),
        )  # fmt: skip
        require(
            self.reasoning_effort in EFFORTS,
            f"data.reasoning_effort must be one of {', '.join(EFFORTS)}; got "
            f"{self.reasoning_effort!r}. Try --set data.reasoning_effort=medium.",
        )
        require(
            self.overlong_prompts in OVERLONG,
            f"data.overlong_prompts must be {' or '.join(OVERLONG)}, got "
            f"{self.overlong_prompts!r}. Try --set data.overlong_prompts=drop.",
        )
