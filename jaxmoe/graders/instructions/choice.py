# SPDX-License-Identifier: Apache-2.0
"""Choose instructions for a row by seed, so that one answer can follow all of them.

Next: jaxmoe/graders/instructions/answers.py writes such an answer; reward.py scores answers.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.json_columns import CHAT_COLUMNS
from jaxmoe.data.rows import Row
from jaxmoe.graders.instructions.checkers import (
    UNAVAILABLE,
    Instruction,
    checker_classes,
    unknown_checker_error,
)
from jaxmoe.graders.instructions.reward import IDS_COLUMN, KWARGS_COLUMN

_WORDS = (
    "apple bridge candle desert engine forest garden hammer island jacket kettle ladder market "
    "needle orange pencil quarry rocket saddle tunnel valley window yellow zipper"
).split()
_END_PHRASES = ("That is all.", "Hope this helps.", "The end.", "Ask me more.")
Arguments = Callable[[random.Random], dict[str, Any]]


def _relation(name: str) -> dict[str, str]:
    return {name: "at least"}


# Text and arguments of the instructions that can be chosen. Each asks for little, so that short
# answers can follow several.
_CHOICES: Mapping[str, tuple[str, Arguments]] = {
    "change_case:english_capital": ("Answer in English, in capital letters only.", lambda r: {}),
    "change_case:english_lowercase": ("Answer in English, in lowercase only.", lambda r: {}),
    "combination:two_responses": (
        "Give two different answers, with ****** between them.",
        lambda r: {},
    ),
    "count:numbers": ("Write exactly {N} numbers.", lambda r: {"N": r.randint(1, 3)}),
    "detectable_content:number_placeholders": (
        "Write at least {num_placeholders} placeholders like [name].",
        lambda r: {"num_placeholders": r.randint(1, 3)},
    ),
    "detectable_content:postscript": (
        "Add a postscript that starts with {postscript_marker}",
        lambda r: {"postscript_marker": "P.S."},
    ),
    "detectable_format:json_format": ("Write nothing but valid JSON.", lambda r: {}),
    "detectable_format:number_bullet_lists": (
        "Write exactly {num_bullets} bullet points, each a line that starts with *.",
        lambda r: {"num_bullets": r.randint(1, 3)},
    ),
    "detectable_format:number_highlighted_sections": (
        "Highlight at least {num_highlights} parts like *this*.",
        lambda r: {"num_highlights": r.randint(1, 3)},
    ),
    "detectable_format:title": ("Write a title like <<this>>.", lambda r: {}),
    "format:no_whitespace": ("Use no spaces or line breaks.", lambda r: {}),
    "format:parentheses": ("Nest brackets at least 5 deep.", lambda r: {}),
    "keywords:existence": (
        "Write the words {keywords[0]} and {keywords[1]}.",
        lambda r: {"keywords": r.sample(_WORDS[:8], 2)},
    ),
    "keywords:forbidden_words": (
        "Do not write the words {forbidden_words[0]} and {forbidden_words[1]}.",
        lambda r: {"forbidden_words": r.sample(_WORDS[8:16], 2)},
    ),
    "keywords:frequency": (
        "Write the word {keyword} at least {frequency} times.",
        lambda r: {
            "keyword": r.choice(_WORDS[16:]),
            "frequency": r.randint(2, 3),
            **_relation("relation"),
        },
    ),
    "keywords:letter_frequency": (
        "Write the letter {letter} at least {let_frequency} times.",
        lambda r: {
            "letter": r.choice("jkqvwxz"),
            "let_frequency": r.randint(2, 5),
            **_relation("let_relation"),
        },
    ),
    "length_constraints:number_paragraphs": (
        "Write {num_paragraphs} paragraphs, with *** between them.",
        lambda r: {"num_paragraphs": r.randint(2, 3)},
    ),
    "length_constraints:number_words": (
        "Write at least {num_words} words.",
        lambda r: {"num_words": r.randint(3, 12), **_relation("relation")},
    ),
    "punctuation:no_comma": ("Use no commas.", lambda r: {}),
    "startend:end_checker": (
        "End with these words: {end_phrase}",
        lambda r: {"end_phrase": r.choice(_END_PHRASES)},
    ),
    "startend:quotation": ("Put the answer in double quotes.", lambda r: {}),
}
CHOICES = tuple(_CHOICES)
_LAYOUTS = (
    "combination:two_responses",
    "detectable_format:number_bullet_lists",
    "detectable_format:number_highlighted_sections",
    "length_constraints:number_paragraphs",
)
_CASES = ("change_case:english_capital", "change_case:english_lowercase")
# The others write several words, or lines.
_SINGLE_WORDS = (
    "detectable_content:number_placeholders",
    "detectable_format:title",
    "format:parentheses",
    "keywords:existence",
    "keywords:forbidden_words",
    "keywords:frequency",
    "keywords:letter_frequency",
    "punctuation:no_comma",
    "startend:quotation",
)


def in_conflict(a: str, b: str) -> bool:
    """True if no answer, or only a contrived one, follows instructions of both ids."""
    if a == b or "detectable_format:json_format" in (a, b):
        return True
    if "format:no_whitespace" in (a, b):
        return not {a, b} - {"format:no_whitespace"} <= {*_SINGLE_WORDS}
    # Stars mark all four.
    return any({a, b} <= {*group} for group in (_LAYOUTS, _CASES))


def choose_instructions(
    rng: random.Random, ids: Sequence[str], at_least: int, at_most: int
) -> list[Instruction]:
    """Between at_least and at_most instructions with these ids, none in conflict.

    Raises: ConfigError if there are not as many without a conflict.
    """
    count = rng.randint(at_least, at_most)
    shuffled = rng.sample(list(ids), len(ids))
    for size in range(count, at_least - 1, -1):
        for chosen in itertools.combinations(shuffled, size):
            if not any(in_conflict(a, b) for a, b in itertools.combinations(chosen, 2)):
                return [Instruction(name, _CHOICES[name][1](rng)) for name in chosen]
    raise ConfigError(
        f"data.map_rows: add_instructions(at_least={at_least}) must be at most the instructions "
        f"that one answer can follow; of {', '.join(ids)} no {at_least} can be. Name other types, "
        "or give a smaller at_least."
    )


def describe_instruction(instruction: Instruction) -> str:
    """The sentence that asks for an instruction."""
    return _CHOICES[instruction.id][0].format(**instruction.kwargs)


def add_instructions(
    row: Row, seed: int, *, types: Sequence[str] = CHOICES, at_least: int = 1, at_most: int = 3
) -> Row:
    """The row with instructions behind its question, and IFEval's columns for them.

    The instructions are a function of the seed, the row's question and the options.

    types: ids to choose from.
    at_least, at_most: bounds of the number of instructions.
    Raises: ConfigError for an option that is not valid, or a row that has instructions already.
    """
    _check_options(types, at_least, at_most)
    if row.columns.get(IDS_COLUMN):
        raise ConfigError(
            f"data.map_rows: add_instructions must have rows without {IDS_COLUMN}, got "
            f"{row.location or row.question!r:.60} with {row.columns[IDS_COLUMN]!r:.60}, which "
            'nothing would check. Try --set "data.map_rows=".'
        )
    # A text as the seed gives the same numbers in every process and version of Python.
    rng = random.Random(f"{seed} {row.identity}")
    chosen = choose_instructions(rng, types, at_least, at_most)
    text = " ".join(map(describe_instruction, chosen))
    columns = dict(row.columns)
    for name in CHAT_COLUMNS:
        if name in columns:
            # Reward functions, such as a judge, see the prompt in the columns.
            columns[name] = _append_text(columns[name], text)
            break
    columns |= {IDS_COLUMN: [x.id for x in chosen], KWARGS_COLUMN: [dict(x.kwargs) for x in chosen]}
    return replace(row, question=f"{row.question}\n{text}", columns=columns)


def _check_options(types: Sequence[str], at_least: int, at_most: int) -> None:
    key = "data.map_rows"
    is_list = isinstance(types, list | tuple) and len(types) > 0
    if not is_list or not all(isinstance(name, str) for name in types):
        raise ConfigError(
            f"{key}: add_instructions(types=…) must be a list of names, got {types!r:.60}. "
            "Try types=['punctuation:no_comma', 'startend:quotation']."
        )
    if (
        not isinstance(at_least, int)
        or not isinstance(at_most, int)
        or not 1 <= at_least <= at_most
    ):
        raise ConfigError(
            f"{key}: add_instructions must have 1 <= at_least <= at_most, got {at_least} and "
            f"{at_most}. Try at_least=1, at_most=3."
        )
    for name in types:
        if name in _CHOICES:
            continue
        error = unknown_checker_error(name, CHOICES, key)
        if name not in UNAVAILABLE and name in checker_classes():
            error = ConfigError(
                f"{key}: add_instructions cannot choose {name}; answers to rows that have it can "
                f"be scored. It chooses from {', '.join(CHOICES)}."
            )
        raise error


def _append_text(prompt: Any, text: str) -> Any:
    """A prompt as a row stores it, a text or a chat, with a line behind its last turn."""
    if isinstance(prompt, str):
        return f"{prompt}\n{text}"
    *earlier, last = prompt
    content = last["content"]
    parts = (
        f"{content}\n{text}"
        if isinstance(content, str)
        else [*content, {"type": "text", "text": text}]
    )
    return [*earlier, {**last, "content": parts}]
