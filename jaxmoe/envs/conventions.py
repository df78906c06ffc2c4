# SPDX-License-Identifier: Apache-2.0
"""How reward functions are called by TRL, by verl and by us, and what may come back.

Which convention a function follows is read off the names of its parameters.
Next: jaxmoe/envs/rewards.py weighs and adds what they return.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import stored_answer
from jaxmoe.data.harmony import Spoken
from jaxmoe.data.json_columns import CHATS
from jaxmoe.data.rows import Row

TRL = ("prompts", "completions", "completion_ids")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OURS = ("prompt", "response", "row", "analysis")
_FRESH = ("completions", "completion_ids")  # made for the call, and long
_ACCEPTED = (
    "(completions, **columns) as TRL's, (data_source, solution_str, ground_truth, extra_info) as "
    "verl's, or (prompt, response, row)"
)


@dataclass(frozen=True)
class Sample:
    """One response, and the row it answers."""

    number: int  # of the row in its source
    row: Row
    spoken: Spoken
    tokens: Sequence[int]  # all of the response, its stop token included

    @property
    def asked(self) -> Any:
        """The prompt as the row has it: a text, or a chat."""
        columns = self.row.columns
        return next((columns[name] for name in CHATS if name in columns), self.row.question)

    @property
    def named(self) -> str:
        return f"row {self.number}" + (f" ({self.row.where})" if self.row.where else "")


# a sample's values: "score" and other parts; nothing where the function leaves it out
Values = list[dict[str, Any]]
Convention = Callable[[str, Callable[..., Any], Sequence[Sample]], Values]


def convention(where: str, function: Callable[..., Any], columns: Sequence[str]) -> Convention:
    """How to call a function; its options are bound.

    Raises: ConfigError for parameters of no convention.
    """
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind in named}
    names = {p.name for p in parameters}
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    for mark, known, call in (
        ({"completions", "completion_ids"}, {*TRL, *columns} - {"prompt"}, as_trl),
        ({"solution_str"}, set(VERL), as_verl),
        ({"response"}, set(OURS), as_ours),
    ):
        if names & mark and not positional:
            if needed <= known:
                return call
            missing = sorted(needed - known)[0]
            raise ConfigError(
                f"{where} asks for {missing}; what there is: {', '.join(sorted(known))}. "
                f"Give {missing} a default" + (
                    ", or the rows a column of that name." if call is as_trl else "."
                )
            )  # fmt: skip
    raise ConfigError(
        f"{where} must take {_ACCEPTED}; it takes ({', '.join(map(str, parameters))}). "
        "Wrap it in a function that does."
    )


def as_trl(where: str, function: Callable[..., Any], samples: Sequence[Sample]) -> Values:
    """Once for all samples: lists of prompts, completions, token ids, and of every column.

    A completion is a text, or, where the row's prompt is a chat, a chat of one turn. A column
    that a row has not is None, as in a Hugging Face dataset. None leaves a sample out.
    """
    chats = [isinstance(s.asked, list) for s in samples]
    lists: dict[str, list[Any]] = {
        name: [s.row.columns.get(name) for s in samples]
        for name in dict.fromkeys(name for s in samples for name in s.row.columns)
        if name not in ("prompt", "completion")
    } | {
        "prompts": [s.asked for s in samples],
        "completions": [
            [{"role": "assistant", "content": s.spoken.text}] if chat else s.spoken.text
            for s, chat in zip(samples, chats, strict=True)
        ],
        "completion_ids": [list(s.tokens) for s in samples],
    }  # fmt: skip
    names = samples[0].named if len(samples) == 1 else f"{samples[0].named} and the rows with it"
    found = _called(where, function, lists, names)
    try:
        values = list(found)
    except TypeError:
        values = None
    if values is None or isinstance(found, str | Mapping) or len(values) != len(samples):
        raise ConfigError(
            f"{where} must return a list of {len(samples)} rewards, one a completion, got "
            f"{found!r:.80}."
        )
    return [{} if value is None else {"score": value} for value in values]


def as_verl(where: str, function: Callable[..., Any], samples: Sequence[Sample]) -> Values:
    """A number, or a dict with "score" and other parts, sample by sample.

    ground_truth is reward_model.ground_truth, or else the stored answer, as the file has it.
    """

    def given(s: Sample) -> dict[str, Any]:
        columns = s.row.columns
        name, stored = stored_answer(columns)
        return {
            "data_source": columns.get("data_source"),
            "solution_str": s.spoken.text,
            "ground_truth": stored if name else s.row.answer,
            "extra_info": columns.get("extra_info") or {},
        }

    return [_scored(_called(where, function, given(s), s.named)) for s in samples]


def as_ours(where: str, function: Callable[..., Any], samples: Sequence[Sample]) -> Values:
    """As verl's; the row is a dict of its columns, analysis what was thought aloud."""

    def given(s: Sample) -> dict[str, Any]:
        plain = {"question": s.row.question, "answer": s.row.answer}
        return {
            "prompt": s.asked, "response": s.spoken.text, "analysis": s.spoken.analysis,
            "row": dict(s.row.columns) or plain,
        }  # fmt: skip

    return [_scored(_called(where, function, given(s), s.named)) for s in samples]


def _scored(found: Any) -> dict[str, Any]:
    if isinstance(found, Mapping):
        return {str(name): value for name, value in found.items()} | {"score": found.get("score")}
    return {"score": found}


def _called(where: str, function: Callable[..., Any], given: dict[str, Any], rows: str) -> Any:
    """What it returns of those it takes; an error of its own keeps its traceback."""
    parameters = inspect.signature(function).parameters.values()
    bound = getattr(function, "keywords", {})
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        given = {name: value for name, value in given.items() if name in names}
    # copies: a function that edits its row must not edit the next epoch's
    given = {
        name: x if name in _FRESH else copy.deepcopy(x)
        for name, x in given.items() if name not in bound
    }  # fmt: skip
    try:
        return function(**given)
    except SystemExit as error:
        raise RuntimeError(f"{where} called sys.exit({error.code!r}) on {rows}.") from error
    except Exception as error:
        error.add_note(f"{where} raised this on {rows}.")
        raise
