# SPDX-License-Identifier: Apache-2.0
"""Calling conventions of reward functions: those of TRL, of verl, and our own.

The names of a function's parameters decide which convention it follows.
Next: jaxmoe/rewards/rewards.py adds up the weighted results.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import stored_answer
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.json_columns import CHAT_COLUMNS
from jaxmoe.data.rows import Row

TRL = ("prompts", "completions", "completion_ids", "trainer_state")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
NATIVE = ("prompt", "response", "row", "analysis")
_ENVIRONMENTS = "environments"
_NOT_COPIED = ("completions", "completion_ids")  # made for the call, and long
_ACCEPTED_SIGNATURES = (
    "(completions, **columns) as TRL's, (data_source, solution_str, ground_truth, extra_info) as "
    "verl's, or (prompt, response, row)"
)


@dataclass(frozen=True)
class Sample:
    """One response, and the row it answers."""

    number: int  # of the row in its source
    row: Row
    parsed: ParsedResponse
    tokens: Sequence[int]  # all of the response, its stop token included
    turns: Sequence[tuple[int, int]] = ()  # [start, end) of the policy's among them; (): one turn

    @property
    def prompt(self) -> Any:
        """The prompt as the row has it: a text, or a chat."""
        columns = self.row.columns
        return next((columns[name] for name in CHAT_COLUMNS if name in columns), self.row.question)

    @property
    def label(self) -> str:
        return f"row {self.number}" + (f" ({self.row.location})" if self.row.location else "")


# For each sample: "score" and other parts; an empty dict if the function returned None for it. The
# score is UNDECIDED if the function returned a dict with the score None.
UNDECIDED = object()
Values = list[dict[str, Any]]


@dataclass(frozen=True)
class Convention:
    """How a reward function is called, and how its results are parsed.

    batch: True if one call scores all samples.
    arguments: returns all available arguments of a call, by parameter name; see `make_calls`.
    """

    batch: bool
    arguments: Callable[[Sequence[Sample], SimpleNamespace, Sequence[str]], dict[str, Any]]

    def make_calls(
        self,
        function: Callable[..., Any],
        samples: Sequence[Sample],
        state: SimpleNamespace,
        columns: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """The arguments of each call, limited to the parameters of the function.

        state: TRL's trainer_state: global_step and max_steps.
        columns: of the task's rows; these samples may lack some.
        """
        batches = [samples] if self.batch else [[sample] for sample in samples]
        return [
            _select_arguments(function, self.arguments(batch, state, columns)) for batch in batches
        ]

    def parse_values(
        self, label: str, returned: Sequence[Any], samples: Sequence[Sample]
    ) -> Values:
        """The score and parts that the calls returned for each sample; None becomes {}.

        Raises: ConfigError if a batch call does not return a list of len(samples) values.
        """
        scores = _check_list(label, returned[0], len(samples)) if self.batch else returned
        return [{} if score is None else _parse_score(score) for score in scores]


def detect_convention(
    label: str, function: Callable[..., Any], columns: Sequence[str]
) -> Convention:
    """The convention that a function follows; its options must already be bound.

    Raises: ConfigError if its parameters fit no convention.
    """
    parameters = inspect.signature(function).parameters.values()
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = {p.name for p in parameters if p.default is p.empty and p.kind in named_kinds}
    names = {p.name for p in parameters if p.kind in named_kinds}
    if _ENVIRONMENTS in required - {*columns}:
        raise ConfigError(
            f"{label} requires environments, the objects of TRL's environment_factory. Reward "
            "functions run in another process, which cannot have them. Return the reward from "
            "get_reward() of the environment instead: it is added to those of data.rewards."
        )
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    for marker_names, available, match in (
        ({"completions", "completion_ids"}, {*TRL, *columns} - {"prompt"}, TRL_CONVENTION),
        ({"solution_strs"}, set(VERL_BATCH), VERL_BATCH_CONVENTION),
        ({"solution_str"}, set(VERL), VERL_CONVENTION),
        ({"response"}, set(NATIVE), NATIVE_CONVENTION),
    ):
        if names & marker_names and not positional:
            if required <= available:
                return match
            missing_name = sorted(required - available)[0]
            raise ConfigError(
                f"{label} requires {missing_name}; available are: {', '.join(sorted(available))}. "
                f"Give {missing_name} a default"
                + (", or the rows a column of that name." if match is TRL_CONVENTION else ".")
            )
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters) and not positional
    if takes_any_keyword and required <= {*TRL, *columns} - {"prompt"}:
        # TRL calls every function with all that there is, so f(**kwargs) is one of its functions.
        return TRL_CONVENTION
    raise ConfigError(
        f"{label} must take {_ACCEPTED_SIGNATURES}; it takes ({', '.join(map(str, parameters))}). "
        "Wrap it in a function that does."
    )


def _trl_arguments(
    samples: Sequence[Sample], state: SimpleNamespace, columns: Sequence[str]
) -> dict[str, Any]:
    """TRL's arguments: lists of prompts, completions, token ids, and of every column.

    A completion is a text, or a chat of one turn if the row's prompt is a chat. A column of the
    task that a row lacks is None, as in a Hugging Face dataset.
    """
    chats = [isinstance(s.prompt, list) for s in samples]
    names = (*columns, *(name for s in samples for name in s.row.columns))
    return {
        name: [s.row.columns.get(name) for s in samples]
        for name in dict.fromkeys(names)
        # TRL passes every column but these two, which it passes as prompts and completions.
        if name not in ("prompt", "completion")
    } | {
        "prompts": [s.prompt for s in samples],
        "completions": [
            [{"role": "assistant", "content": s.parsed.text}] if chat else s.parsed.text
            for s, chat in zip(samples, chats, strict=True)
        ],
        "completion_ids": [list(s.tokens) for s in samples],
        "trainer_state": state,
    }


def _verl_arguments(samples: Sequence[Sample], *_: Any) -> dict[str, Any]:
    """verl's arguments. ground_truth is reward_model.ground_truth, else the unparsed answer."""
    columns = samples[0].row.columns
    name, stored = stored_answer(columns)
    return {
        "data_source": columns.get("data_source"),
        "solution_str": samples[0].parsed.text,
        "ground_truth": stored if name else samples[0].row.answer,
        "extra_info": columns.get("extra_info") or {},
    }


def _verl_batch_arguments(samples: Sequence[Sample], *_: Any) -> dict[str, Any]:
    """The arguments of verl's batch reward manager: those of `_verl_arguments`, in lists."""
    arguments_by_sample = [_verl_arguments([sample]) for sample in samples]
    return {f"{name}s": [arguments[name] for arguments in arguments_by_sample] for name in VERL}


def _native_arguments(samples: Sequence[Sample], *_: Any) -> dict[str, Any]:
    """Our own arguments: row is a dict of its columns, analysis the text of that channel."""
    (sample,) = samples
    plain = {"question": sample.row.question, "answer": sample.row.answer}
    return {
        "prompt": sample.prompt,
        "response": sample.parsed.text,
        "analysis": sample.parsed.analysis,
        "row": dict(sample.row.columns) or plain,
    }


TRL_CONVENTION = Convention(True, _trl_arguments)
VERL_BATCH_CONVENTION = Convention(True, _verl_batch_arguments)
VERL_CONVENTION = Convention(False, _verl_arguments)
NATIVE_CONVENTION = Convention(False, _native_arguments)


def _check_list(label: str, returned: Any, count: int) -> list[Any]:
    try:
        values = list(returned)
    except TypeError:
        values = None
    # A text or a dict has a length too, but is one value.
    if values is None or isinstance(returned, str | Mapping) or len(values) != count:
        raise ConfigError(
            f"{label} must return a list of {count} rewards, one per completion, got "
            f"{returned!r:.80}."
        )
    return values


def is_undecided(values: Mapping[str, Any]) -> bool:
    """True if a function could not decide the score of a sample, and said so in a dict."""
    return values.get("score") is UNDECIDED


def _parse_score(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, Mapping):
        return {"score": returned}
    score = UNDECIDED if "score" in returned and returned["score"] is None else None
    return {str(name): value for name, value in returned.items()} | {
        "score": score or returned.get("score")
    }


def _select_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that a function takes and no option sets."""
    parameters = inspect.signature(function).parameters.values()
    bound = getattr(function, "keywords", {})
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        arguments = {name: value for name, value in arguments.items() if name in names}
    # Copy, so that a function that modifies its arguments does not change the next epoch's row.
    return {
        name: value if name in _NOT_COPIED else copy.deepcopy(value)
        for name, value in arguments.items()
        if name not in bound
    }
