# SPDX-License-Identifier: Apache-2.0
"""Config of prompts, templates and rewards. Next: jaxmoe/data/files.py reads rows."""

from dataclasses import dataclass, field
from typing import Any

from jaxmoe.config.errors import SHARE, check_fields, require

EFFORTS = ("low", "medium", "high")
OVERLONG = ("refuse", "drop")
DISTINCT = ("off", "row", "question")
COLUMNS = ("question", "answer", "system")


@dataclass(frozen=True)
class DataConfig:
    """Prompts with checkable answers."""

    # "reasoning_gym:NAME", a file, a folder, "FOLDER/*.jsonl", "package:NAME/path/in/it", or a
    # list of these
    task: str | list
    options: dict[str, Any] = field(default_factory=dict)  # for reasoning_gym tasks
    # a file's names of its question, answer and system columns: {"question": "problem"}
    columns: dict[str, Any] = field(default_factory=dict)
    # a text with "{question}", "chat" (the tokenizer's chat template) or "harmony" (GPT-OSS's
    # format); auto: chat for rows that are chats, the plain text for others
    template: str = "auto"
    # "module:function(option=1)": from a row of the task to the row that is asked; empty: as it is
    map_rows: str = ""
    system: str = ""  # system prompt of rows without one; the template's {system}
    # True: prompts in harmony keep the analysis of earlier answers, which served chats leave out
    keep_analysis: bool = False
    reasoning_effort: str = "medium"  # harmony's: low, medium or high
    rewards: str = ""  # "0.9 * module:function(option=1) + 0.1 * …"; empty: the task's scorer
    # limit of one call of the rewards, in a separate process; 0: in this process, without a limit
    reward_timeout_s: float = 300.0
    # share of the answers that are graded against another row too (reward/swapped); 0: none. It
    # costs that share of the time of grading
    swapped_share: float = 0.25
    # a stricter grader of a share of the answers, in the form of `rewards`; never trained on
    second_grader: str = ""
    second_grader_share: float = 0.25
    # replies to the policy in episodes of several turns: "module:class(option=1)"; empty: only the
    # tools reply
    environment: str = ""
    tools: str = ""  # "python + module:function(option=1)": what the policy may call
    train_rows: int | str = 4096  # or "all": all rows of a file except the held-out ones
    held_out_rows: int = 256
    # which copies are left out: of a row, of a question; off: every row is kept
    distinct: str = "off"
    shuffle: bool = True  # reshuffle in every epoch; False: keep the order of the files
    max_prompt_tokens: int = 512
    overlong_prompts: str = "refuse"  # stop at a longer prompt; or "drop": leave out its row

    def __post_init__(self) -> None:
        require(
            isinstance(self.task, str)
            or (bool(self.task) and all(isinstance(name, str) for name in self.task)),
            f"data.task must be a text, or a list of texts, got {self.task!r:.60}. "
            """Try --set "data.task=['a.jsonl', 'b.jsonl']".""",
        )
        require(
            isinstance(self.train_rows, int) or self.train_rows == "all",
            f"data.train_rows must be a number or all, got {self.train_rows!r}. "
            "Try --set data.train_rows=all.",
        )
        check_fields(
            "data",
            self,
            max_prompt_tokens=("above 0", lambda x: x > 0, 512),
            swapped_share=(*SHARE, 0.25),
            second_grader_share=(*SHARE, 0.25),
            reward_timeout_s=("0 or more, and finite", lambda x: 0 <= x < 1e9, 300.0),
        )
        require(
            self.reasoning_effort in EFFORTS,
            f"data.reasoning_effort must be one of {', '.join(EFFORTS)}; got "
            f"{self.reasoning_effort!r}. Try --set data.reasoning_effort=medium.",
        )
        require(
            self.distinct in DISTINCT,
            f"data.distinct must be one of {', '.join(DISTINCT)}; got {self.distinct!r}. "
            "Try --set data.distinct=row, which leaves out copies of rows.",
        )
        for name, column in self.columns.items():
            require(
                name in COLUMNS and isinstance(column, str) and bool(column),
                f"data.columns must name the file's columns of {', '.join(COLUMNS)}, got "
                f"{name!r:.60}: {column!r:.60}. Try --set \"data.columns={{'question': 'problem', "
                "'answer': 'final'}\".",
            )
        require(
            self.overlong_prompts in OVERLONG,
            f"data.overlong_prompts must be {' or '.join(OVERLONG)}, got "
            f"{self.overlong_prompts!r}. Try --set data.overlong_prompts=drop.",
        )
