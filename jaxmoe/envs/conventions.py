# SPDX-License-Identifier: Apache-2.0
"""How reward functions are called by TRL, by verl and by us, and what may come back.

Which convention a function follows is read off the names of its parameters.
Next: jaxmoe/envs/rewards.py weighs and adds what they return.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import stored_answer
from jaxmoe.data.harmony import Spoken
from jaxmoe.data.json_columns import CHATS
from jaxmoe.data.rows import Row

TRL = ("prompts", "completions", "completion_ids", "trainer_state")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
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


@dataclass(frozen=True)
class Convention:
    """How a function is called, and what comes back.

    batch: whether one call is for all samples.
    arguments: all that there is for a call, by parameter.
    """

    batch: bool
    arguments: Callable[[Sequence[Sample], SimpleNamespace], dict[str, Any]]

    def calls(
        self, function: Callable[..., Any], samples: Sequence[Sample], state: SimpleNamespace
    ) -> list[dict[str, Any]]:
        """The arguments of each call: those that the function takes.

        state: of the trainer, as TRL tells it: global_step, max_steps.
        """
        batches = [samples] if self.batch else [[sample] for sample in samples]
        return [_taken(function, self.arguments(batch, state)) for batch in batches]

    def values(self, where: str, returned: Sequence[Any], samples: Sequence[Sample]) -> Values:
        """The parts that the calls returned for each sample. None leaves it out.

        Raises: ConfigError where a batch's list has another length.
        """
        scores = _listed(where, returned[0], len(samples)) if self.batch else returned
        return [{} if score is None else _scored(score) for score in scores]


def convention(where: str, function: Callable[..., Any], columns: Sequence[str]) -> Convention:
    """How to call a function; its options are bound.

    Raises: ConfigError for parameters of no convention.
    """
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind in named}
    names = {p.name for p in parameters if p.kind in named}
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    for mark, known, found in (
        ({"completions", "completion_ids"}, {*TRL, *columns} - {"prompt"}, AS_TRL),
        ({"solution_strs"}, set(VERL_BATCH), AS_VERL_BATCH),
        ({"solution_str"}, set(VERL), AS_VERL),
        ({"response"}, set(OURS), AS_OURS),
    ):
        if names & mark and not positional:
            if needed <= known:
                return found
            missing = sorted(needed - known)[0]
            raise ConfigError(
                f"{where} asks for {missing}; what there is: {', '.join(sorted(known))}. "
                f"Give {missing} a default" + (
                    ", or the rows a column of that name." if found is AS_TRL else "."
                )
            )  # fmt: skip
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters) and not positional
    if takes_all and needed <= {*TRL, *columns} - {"prompt"}:
        return AS_TRL  # def f(**kwargs): TRL calls every function with all there is
    raise ConfigError(
        f"{where} must take {_ACCEPTED}; it takes ({', '.join(map(str, parameters))}). "
        "Wrap it in a function that does."
    )


def _as_trl(samples: Sequence[Sample], state: SimpleNamespace) -> dict[str, Any]:
    """Lists of prompts, completions, token ids, and of every column.

    A completion is a text, or, where the row's prompt is a chat, a chat of one turn. A column
    that a row has not is None, as in a Hugging Face dataset.
    """
    chats = [isinstance(s.asked, list) for s in samples]
    return {
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
        "trainer_state": state,
    }  # fmt: skip


def _as_verl(samples: Sequence[Sample], _: SimpleNamespace) -> dict[str, Any]:
    """ground_truth is reward_model.ground_truth, or else the stored answer, as the file has it."""
    columns = samples[0].row.columns
    name, stored = stored_answer(columns)
    return {
        "data_source": columns.get("data_source"),
        "solution_str": samples[0].spoken.text,
        "ground_truth": stored if name else samples[0].row.answer,
        "extra_info": columns.get("extra_info") or {},
    }


def _as_verl_batch(samples: Sequence[Sample], state: SimpleNamespace) -> dict[str, Any]:
    """The arguments of verl's batch reward manager: those of `_as_verl`, in lists."""
    each = [_as_verl([sample], state) for sample in samples]
    return {f"{name}s": [given[name] for given in each] for name in VERL}


def _as_ours(samples: Sequence[Sample], _: SimpleNamespace) -> dict[str, Any]:
    """The row is a dict of its columns, analysis what was thought aloud."""
    (sample,) = samples
    plain = {"question": sample.row.question, "answer": sample.row.answer}
    return {
        "prompt": sample.asked, "response": sample.spoken.text,
        "analysis": sample.spoken.analysis, "row": dict(sample.row.columns) or plain,
    }  # fmt: skip


AS_TRL = Convention(True, _as_trl)
AS_VERL_BATCH = Convention(True, _as_verl_batch)
AS_VERL = Convention(False, _as_verl)
AS_OURS = Convention(False, _as_ours)


def _listed(where: str, found: Any, count: int) -> list[Any]:
    try:
        values = list(found)
    except TypeError:
        values = None
    if values is None or isinstance(found, str | Mapping) or len(values) != count:
        raise ConfigError(
            f"{where} must return a list of {count} rewards, one a completion, got {found!r:.80}."
        )
    return values


def _scored(found: Any) -> dict[str, Any]:
    if isinstance(found, Mapping):
        return {str(name): value for name, value in found.items()} | {"score": found.get("score")}
    return {"score": found}


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that a function takes and no option sets."""
    parameters = inspect.signature(function).parameters.values()
    bound = getattr(function, "keywords", {})
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        given = {name: value for name, value in given.items() if name in names}
    # copies: a function that edits its row must not edit the next epoch's
    return {
        name: x if name in _FRESH else copy.deepcopy(x)
        for name, x in given.items() if name not in bound
    }  # fmt: skip
