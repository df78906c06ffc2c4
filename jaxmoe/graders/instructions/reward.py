# SPDX-License-Identifier: Apache-2.0
"""The reward for following the instructions of a row: `score_instructions`.

Next: jaxmoe/graders/instructions/checkers.py.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Row
from jaxmoe.graders.instructions.checkers import (
    Instruction,
    check_instruction,
    follows_instruction,
)
from jaxmoe.rewards.reward_specs import checked_by, paid_alike_by

LEVELS = ("prompt_level", "instruction_level")
IDS_COLUMN, KWARGS_COLUMN = "instruction_id_list", "kwargs"


def check_reward(rows: Sequence[Row], *, reward: str = LEVELS[0]) -> None:
    """Raise ConfigError for an unknown option, or a row whose instructions cannot be checked."""
    if reward not in LEVELS:
        raise ConfigError(
            f"data.rewards: score_instructions(reward=…) must be {' or '.join(LEVELS)}, got "
            f"{reward!r}. Try score_instructions(reward='{LEVELS[0]}')."
        )
    for number, row in enumerate(rows):
        try:
            for instruction in read_instructions(row.columns):
                check_instruction(instruction)
        except ConfigError as error:
            raise ConfigError(f"{row.location or f'row {number}'}: {error}") from error


def read_instruction_ids(columns: Mapping[str, Any]) -> set[str]:
    """The kinds of instruction of a row: an answer may follow those of two rows that share one."""
    return {instruction.id for instruction in read_instructions(columns)}


@paid_alike_by(read_instruction_ids)
@checked_by(check_reward)
def score_instructions(
    response: str, row: Mapping[str, Any], *, reward: str = LEVELS[0]
) -> dict[str, float]:
    """Share of a row's instructions that an answer follows, by strict checks.

    The row has IFEval's columns: instruction_id_list, and kwargs with a dict for each id.

    reward: "prompt_level" pays 1 if all instructions are followed, else 0; "instruction_level" pays
        the share that is followed.

    Returns: the reward as "score"; prompt_level and instruction_level; checker_errors, 1 if a
        checker could not read the answer, which then does not follow; and by instruction, such as
        punctuation/no_comma, 1 if it is followed.
    """
    instructions = read_instructions(row)
    results = [follows_instruction(response, instruction) for instruction in instructions]
    followed = [float(result or False) for result in results]
    levels = {LEVELS[0]: float(all(followed)), LEVELS[1]: sum(followed) / len(followed)}
    by_type: dict[str, list[float]] = {}
    for instruction, value in zip(instructions, followed, strict=True):
        by_type.setdefault(instruction.id.replace(":", "/"), []).append(value)
    return {
        "score": levels[reward],
        **levels,
        "checker_errors": float(None in results),
        **{name: sum(values) / len(values) for name, values in by_type.items()},
    }


def read_instructions(columns: Mapping[str, Any]) -> list[Instruction]:
    """The instructions in a row's columns, which may be stored as JSON text.

    Raises: ConfigError if there are none, or not a dict of kwargs for each.
    """
    ids, kwargs = (_decode(columns.get(name)) for name in (IDS_COLUMN, KWARGS_COLUMN))
    if isinstance(ids, list) and kwargs is None:
        kwargs = [{}] * len(ids)
    if not (isinstance(ids, list) and isinstance(kwargs, list) and len(ids) == len(kwargs) > 0):
        raise _columns_error(ids, kwargs)
    instructions: list[Instruction] = []
    for name, value in zip(ids, kwargs, strict=True):
        value = _decode(value) or {}
        if not (isinstance(name, str) and isinstance(value, Mapping)):
            raise _columns_error(ids, kwargs)
        instructions.append(Instruction(name, value))
    return instructions


def _columns_error(ids: Any, kwargs: Any) -> ConfigError:
    return ConfigError(
        f"score_instructions must have rows with {IDS_COLUMN}, a list of names, and "
        f"{KWARGS_COLUMN}, a list with an object for each; got {ids!r:.60} and {kwargs!r:.60}. "
        'To add them: --set "data.map_rows=jaxmoe.graders.instructions:add_instructions".'
    )


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value
