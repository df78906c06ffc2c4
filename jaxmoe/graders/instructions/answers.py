# SPDX-License-Identifier: Apache-2.0
"""Write an answer that follows the instructions of a row: `write_answer`.

A warm start can imitate such answers, and they prove that a row's instructions do not contradict
each other. Next: jaxmoe/graders/instructions/choice.py chooses instructions.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxmoe.graders.instructions.checkers import Instruction

# Long enough that its language is detected whatever else an answer has.
_ENGLISH = (
    "this is the answer that you asked for and there is nothing more to say about it because "
    "everything that could be said about the question was said by other people"
)


def write_answer(text: str, instructions: Sequence[Instruction]) -> str:
    """The text, changed so that it follows instructions that add_instructions chose together.

    text: an answer to the question, such as one word; it must not break the instructions itself.
    """
    kwargs_by_id: dict[str, dict[str, Any]] = {x.id: dict(x.kwargs) for x in instructions}
    if "detectable_format:json_format" in kwargs_by_id:
        return json.dumps(text)
    if {"change_case:english_capital", "change_case:english_lowercase"} & kwargs_by_id.keys():
        text = f"{text} {_ENGLISH}"
    parts = [text, *_plain_parts(kwargs_by_id), *_star_parts(text, kwargs_by_id)]
    if "detectable_content:postscript" in kwargs_by_id:
        parts.append("P.S. ok")
    if "startend:end_checker" in kwargs_by_id:
        parts.append(kwargs_by_id["startend:end_checker"]["end_phrase"])
    if "length_constraints:number_words" in kwargs_by_id:
        missing = kwargs_by_id["length_constraints:number_words"]["num_words"] - _count_words(parts)
        parts[0] += " ok" * missing
    answer = ("" if "format:no_whitespace" in kwargs_by_id else " ").join(parts)
    # A line that begins a bullet list ends in no space, and the text behind one is a line.
    answer = re.sub(r" ?\n ?", "\n", answer)
    if "punctuation:no_comma" in kwargs_by_id:
        answer = answer.replace(",", "")
    if "change_case:english_capital" in kwargs_by_id:
        answer = answer.upper()
    if "change_case:english_lowercase" in kwargs_by_id:
        answer = answer.lower()
    return f'"{answer}"' if "startend:quotation" in kwargs_by_id else answer


def _plain_parts(kwargs_by_id: dict[str, dict[str, Any]]) -> list[str]:
    """Parts that may stand at any place of an answer."""
    parts: list[str] = []
    for name, kwargs in kwargs_by_id.items():
        match name:
            case "keywords:existence":
                parts += kwargs["keywords"]
            case "keywords:frequency":
                parts += [kwargs["keyword"]] * kwargs["frequency"]
            case "keywords:letter_frequency":
                parts.append(kwargs["letter"] * kwargs["let_frequency"])
            case "detectable_content:number_placeholders":
                parts += ["[x]"] * kwargs["num_placeholders"]
            case "detectable_format:title":
                parts.append("<<x>>")
            case "count:numbers":
                parts += [str(number + 1) for number in range(kwargs["N"])]
            case "format:parentheses":
                parts.append("(((((x)))))")
    return parts


def _star_parts(text: str, kwargs_by_id: dict[str, dict[str, Any]]) -> list[str]:
    """Parts for the instruction about the layout; an answer has at most one such."""
    for name, kwargs in kwargs_by_id.items():
        match name:
            case "detectable_format:number_highlighted_sections":
                return ["*x*"] * kwargs["num_highlights"]
            case "detectable_format:number_bullet_lists":
                return ["\n* x"] * kwargs["num_bullets"] + ["\n"]
            case "length_constraints:number_paragraphs":
                return ["*** ok"] * (kwargs["num_paragraphs"] - 1)
            case "combination:two_responses":
                return [f"****** {text} or not"]
    return []


def _count_words(parts: Sequence[str]) -> int:
    return len(re.findall(r"\w+", " ".join(parts)))
