# SPDX-License-Identifier: Apache-2.0
"""Config of prompts, templates and rewards. Next: jaxmoe/data/files.py reads rows."""

from dataclasses import dataclass
from typing import Any

from jaxmoe.config.errors import require
from jaxmoe.config.settings import Section, ValueRule, at_least, between, one_of, setting

COLUMNS = ("question", "answer", "system")
_NAMES = ValueRule(
    "a text, or a list of texts",
    lambda x: isinstance(x, str) or (bool(x) and all(isinstance(name, str) for name in x)),
    ("a.jsonl", ["a.jsonl", "b.jsonl"]),
    ([], ["a.jsonl", 3]),
)
_ROWS = ValueRule(
    "a number or all", lambda x: isinstance(x, int) or x == "all", (7, "all"), ("some",)
)


@dataclass(frozen=True)
class DataConfig(Section, key="data"):
    """Prompts with checkable answers."""

    # reasoning_gym:NAME, a file, a folder, FOLDER/*.jsonl, package:NAME/path, or a list of these
    task: str | list = setting(..., "where rows are", _NAMES, example="a.jsonl")
    options: dict[str, Any] = setting(dict, "options of reasoning_gym's tasks")
    columns: dict[str, Any] = setting(
        dict, "a file's names of its columns question, answer and system"
    )
    template: str = setting(
        "auto",
        "a text with {question}, chat (the tokenizer's) or harmony (GPT-OSS's); auto: chat for "
        "rows that are chats, the plain text for others",
    )
    map_rows: str = setting("", "module:function(option=1) from a task's row to the row asked")
    system: str = setting("", "system prompt of rows without one; the template's {system}")
    keep_analysis: bool = setting(False, "harmony's prompts keep the analysis of earlier answers")
    reasoning_effort: str = setting("medium", "of harmony", one_of("low", "medium", "high"))
    rewards: str = setting(
        "", "0.9 * module:function(option=1) + 0.1 * …; empty: the task's scorer"
    )
    reward_timeout_s: float = setting(
        300.0, "of a call of the rewards; 0: no limit, in this process", at_least(0), resume=True
    )
    swapped_share: float = setting(
        0.25, "share of answers graded for another row too", between(0, 1), resume=True
    )
    second_grader: str = setting(
        "", "a stricter grader, in the form of rewards; never trained on", resume=True
    )
    second_grader_share: float = setting(0.25, "its share of answers", between(0, 1), resume=True)
    environment: str = setting("", "replies in episodes: module:class(option=1); empty: tools")
    tools: str = setting("", "what the policy may call: python + module:function(option=1)")
    train_rows: int | str = setting(
        4096, "number of rows; all: those of a file that are not held out", _ROWS, example="all"
    )
    held_out_rows: int = setting(256, "rows of the evaluation")
    distinct: str = setting(
        "off", "leaves out copies of these", one_of("off", "row", "question"), example="row"
    )
    shuffle: bool = setting(True, "another order in every epoch; False: that of the files")
    max_prompt_tokens: int = setting(
        512, "longest prompt", at_least(1), resume="unless longer prompts were dropped"
    )
    overlong_prompts: str = setting(
        "refuse", "stop, or leave out the row", one_of("refuse", "drop"), example="drop"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, column in self.columns.items():
            require(
                name in COLUMNS and isinstance(column, str) and bool(column),
                f"data.columns must name the file's columns of {', '.join(COLUMNS)}, got "
                f"{name!r:.60}: {column!r:.60}. Try --set \"data.columns={{'question': 'problem', "
                "'answer': 'final'}\".",
            )
