# SPDX-License-Identifier: Apache-2.0
"""The protocol of an environment: whom the policy speaks to in an episode of several turns.

Its shape is that of Gymnasium, with messages as observations and actions. One object is one
episode. Next: jaxmoe/environments/environment_specs.py makes one from a line of a config.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxmoe.data.rows import Message, Row, ToolDescription
from jaxmoe.environments.step_check import EnvironmentFault, describe_value

Unchecked = Any  # a result of somebody else's code that jaxmoe.environments.step_check has not seen


@runtime_checkable
class Environment(Protocol):
    """One episode. Its methods are called in order, but from different threads.

    Results go through jaxmoe.environments.step_check, so messages may also be dicts or a text.
    """

    @property
    def tools(self) -> Sequence[ToolDescription]:
        """The tools that the prompt declares, () for none; valid after `reset`."""
        ...

    def reset(self, row: Row, *, seed: int) -> tuple[list[Message], dict[str, Any]]:
        """Begin the episode; return all messages of the prompt, and info, which may hold
        "state_key".

        All samples of a row are reset with the same seed and must get the same prompt.
        """
        ...

    def step(
        self, messages: list[Message]
    ) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Answer the messages of one turn of the policy.

        Returns (messages to add, reward, terminated, truncated, info). info may hold "rewards",
        the parts that the reward consists of, "metrics", numbers to add up over the episode, and
        "state_key", a text or a whole number that is equal for equal states (see `gigpo`).

        With "context", messages that replace all that the policy has read, it goes on from there;
        the messages to add follow. "sub_agent", the messages of another prompt, begins a
        conversation inside this one, until a step returns "sub_agent_ends": True: its messages
        reply to the turn before the sub-agent. Both need rollout.max_episode_tokens.
        """
        ...

    def close(self) -> Mapping[str, float] | None:
        """End the episode, however it ended; return the rewards due at its end, by part."""
        ...


EnvironmentFactory = Callable[[], Environment]


def append_to_question(messages: list[Message], text: Any, separator: str = "") -> list[Message]:
    """Append a text to the last user message of a prompt; None and "" append nothing.

    Raises: EnvironmentFault for anything but a text, such as images.
    """
    if text is None or (isinstance(text, str) and not text):
        return messages
    if not isinstance(text, str):
        raise EnvironmentFault(f"reset must return a text or None, got {describe_value(text)}")
    *earlier, last = messages
    return [*earlier, dataclasses.replace(last, content=last.content + separator + text)]


def replace_question(messages: list[Message], text: str) -> list[Message]:
    """Keep the system prompt and ask `text` instead of the row's own turns; "" changes nothing."""
    if not text:
        return messages
    return [*(m for m in messages[:1] if m.role == "system"), Message("user", text)]


def turn_text(messages: Sequence[Message]) -> str:
    """The text of a policy's turn, for environments that take a text: its last message.

    Analysis is not part of it.
    """
    texts = [message.content for message in messages if message.channel != "analysis"]
    return texts[-1] if texts else ""


def row_columns(row: Row) -> dict[str, Any]:
    """The columns of a row's record; those of a generated row are its question and its answer."""
    return dict(row.columns) or {"question": row.question, "answer": row.answer}


def check_rows(make_environment: EnvironmentFactory, rows: Iterable[Row]) -> None:
    """Check before a run that an environment finds what it needs in the rows.

    Raises: ConfigError that names the row and the column which is missing.
    """
    check_row = getattr(make_environment(), "check_row", None)
    if check_row is not None:
        for row in rows:
            check_row(row)
