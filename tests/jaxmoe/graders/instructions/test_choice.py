# SPDX-License-Identifier: Apache-2.0
"""Instructions of a row: the same for a seed, without contradictions, and part of the prompt."""

import itertools
import random
from dataclasses import replace

import pytest

from jaxmoe.collection.swapped_rewards import NO_ROW, find_other_rows
from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import parse_call
from jaxmoe.config_file import load_config
from jaxmoe.data.cells import read_row
from jaxmoe.data.rows import Row
from jaxmoe.graders.instructions import add_instructions, score_instructions
from jaxmoe.graders.instructions.answers import write_answer
from jaxmoe.graders.instructions.checkers import checker_classes, follows_instruction
from jaxmoe.graders.instructions.choice import (
    CHOICES,
    choose_instructions,
    describe_instruction,
    in_conflict,
)
from jaxmoe.graders.instructions.reward import read_instructions
from jaxmoe.rewards.rewards import read_rewards
from tests.jaxmoe.graders.instructions.package import needs_package

ROW = Row("What is up?", "word", columns={"question": "What is up?"})
DETECTED = {"change_case:english_capital", "change_case:english_lowercase"}  # slow to check


def compatible(size, names):
    return [
        chosen
        for chosen in itertools.combinations(names, size)
        if not any(in_conflict(a, b) for a, b in itertools.combinations(chosen, 2))
    ]


@needs_package
def test_one_answer_can_follow_any_chosen_instructions():
    quick = [name for name in CHOICES if name not in DETECTED]
    sets = compatible(1, CHOICES) + compatible(2, quick) + compatible(3, quick)
    sets += [names for names in compatible(3, CHOICES) if DETECTED & {*names}][::8]
    assert len(sets) > 700
    for number, names in enumerate(sets):
        rng = random.Random(number)
        chosen = choose_instructions(rng, names, len(names), len(names))
        answer = write_answer("word", chosen)
        for instruction in chosen:
            assert follows_instruction(answer, instruction), (instruction, answer)


@needs_package
def test_no_plain_answer_follows_what_asks_for_something():
    free = {"keywords:forbidden_words", "punctuation:no_comma", "format:no_whitespace"}
    for name in set(CHOICES) - free:
        (chosen,) = choose_instructions(random.Random(0), [name], 1, 1)
        assert not follows_instruction("Word", chosen), name


@needs_package
def test_every_choice_has_a_checker():
    assert set(CHOICES) <= checker_classes().keys()


def test_the_choice_depends_on_seed_question_and_options():
    rows = [Row(f"Question {i}", "a") for i in range(200)]
    first = [add_instructions(row, 3) for row in rows]
    assert [add_instructions(row, 3) for row in rows] == first
    assert [add_instructions(row, 4) for row in rows] != first
    counts = [len(read_instructions(row.columns)) for row in first]
    assert {1, 2, 3} == set(counts)
    used = {x.id for row in first for x in read_instructions(row.columns)}
    assert used == set(CHOICES)
    # By a text as the seed of random.Random, which every version of Python reads alike.
    ids = [x.id for x in read_instructions(add_instructions(ROW, 2).columns)]
    assert ids == ["startend:end_checker", "detectable_format:number_highlighted_sections"]


def test_prompt_and_column_contain_the_instructions():
    row = add_instructions(ROW, 1)
    texts = [describe_instruction(x) for x in read_instructions(row.columns)]
    assert row.question == ROW.question + "\n" + " ".join(texts)
    assert row.columns["question"] == row.question and row.answer == "word"
    assert ROW.columns == {"question": "What is up?"}, "the row itself must not change"
    for content in ("Hi", [{"type": "text", "text": "Hi"}]):
        record = {"prompt": [{"role": "user", "content": content}], "answer": "a"}
        chat = add_instructions(read_row("a:1", record, answers=True), 1)
        reread = read_row("a:1", {**chat.columns, "answer": "a"}, answers=True)
        assert reread.question == chat.question != "Hi"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"types": ["startend:quotaton"]},
            "no checker 'startend:quotaton'. Did you mean start",
            marks=needs_package,
        ),
        ({"types": ["format:title_case"]}, "is not available; it needs data"),
        ({"types": "startend:quotation"}, "must be a list of names, got 'startend"),
        ({"types": []}, "must be a list of names"),
        ({"at_least": 2, "at_most": 1}, "1 <= at_least <= at_most, got 2 and 1"),
        ({"at_least": 0}, "1 <= at_least"),
        ({"types": ["startend:quotation"], "at_least": 2, "at_most": 2}, "no 2 can be"),
    ],
)
def test_impossible_options_are_refused_in_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        add_instructions(ROW, 0, **options)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data.map_rows: ")


@needs_package
def test_a_checker_that_is_never_chosen_is_named():
    with pytest.raises(ConfigError, match="cannot choose custom:multiples; answers to rows"):
        add_instructions(ROW, 0, types=["custom:multiples"])


def test_a_row_that_has_instructions_already_is_refused():
    """Its question would go on to ask for them, and nothing would check them."""
    row = replace(ROW, columns={"instruction_id_list": ["punctuation:no_comma"]}, location="q:3")
    with pytest.raises(ConfigError, match="rows without instruction_id_list, got 'q:3' with"):
        add_instructions(row, 0)


@needs_package
def test_tiny_if_answers_follow_no_compared_rows_instructions():
    """Else reward/swapped would rise when a policy learns, and its alert would mean nothing."""
    data = load_config("tiny_if.py").data
    options = parse_call(data.map_rows, "data.map_rows")[1]
    rows = [add_instructions(Row(f"{i}?", f"word{i}"), 0, **options) for i in range(400)]
    answers = [write_answer("word", read_instructions(row.columns)) for row in rows]

    def score_others(rewards):
        other_rows = find_other_rows(rows, rewards)
        assert NO_ROW not in other_rows
        return [
            score_instructions(answer, rows[j].columns)["score"]
            for answer, j in zip(answers, other_rows, strict=True)
        ]

    assert sum(score_others(read_rewards(data.rewards, []))) == 0.0
    assert sum(score_others([])) > 0.05 * len(rows)  # rows that share an instruction
