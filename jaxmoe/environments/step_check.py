# SPDX-License-Identifier: Apache-2.0
"""Check what an environment returns, before any of it reaches a prompt or a reward.

An environment is somebody else's code. A result that cannot be used raises `EnvironmentFault`,
which ends the episode with the stop reason env_error; the run goes on.
"""

import hashlib
import math
import numbers
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxmoe.data.rows import Message
from jaxmoe.user_code import read_text

MAX_MESSAGES = 64  # in one reply
MAX_NUMBER = 1e30  # of a reward; float32 ends at 3.4e38
MAX_CHARS = 1_000_000  # of one reply: encoding 10 MB takes longer than a step
_ROLES = ("user", "tool", "system", "developer", "assistant")
# A header of harmony ends at a space or a special token.
_HEADER = re.compile(r"[\w./:+-]*")
_EXCERPT_CHARS = 80
_REPR = reprlib.Repr()  # reads a few items of a long list, not all of them
_REPR.maxstring = _REPR.maxother = _EXCERPT_CHARS
_HEADER_FIELDS = ("name", "channel", "recipient", "content_type")


class EnvironmentFault(Exception):
    """An environment returned what no reply can be; the message says what."""


@dataclass(frozen=True)
class StepResult:
    """The checked result of one step.

    rewards: by part; their sum is the reward of the step. The part is "env" if info names none.
    metrics: to be added up over the steps of an episode.
    state_key: of the state that the step led to; None if the environment names none.
    context: messages that replace all that the policy has read; () for none.
    sub_agent: the prompt of a conversation inside this one; () for none.
    ends_sub_agent: True if the conversation inside ends, and `messages` reply to the outer one.
    """

    messages: tuple[Message, ...]
    reward: float
    terminated: bool
    truncated: bool
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state_key: str | None = None
    context: tuple[Message, ...] = ()
    sub_agent: tuple[Message, ...] = ()
    ends_sub_agent: bool = False


def check_step(result: Any) -> StepResult:
    """Return the checked result of `Environment.step`.

    Raises: EnvironmentFault if it is not (messages, reward, terminated, truncated, info), if a
    number is not finite, or if the episode goes on without a message for the policy.
    """
    if not isinstance(result, tuple | list) or len(result) != 5:
        raise EnvironmentFault(
            "step must return (messages, reward, terminated, truncated, info), got "
            f"{describe_value(result)}"
        )
    messages = read_messages(result[0])
    reward = check_number(result[1], "the reward")
    terminated, truncated = _read_flag(result[2], "terminated"), _read_flag(result[3], "truncated")
    info = {} if result[4] is None else result[4]
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info must be a dict, got {describe_value(info)}")
    contexts = {name: read_messages(info.get(name)) for name in ("context", "sub_agent")}
    goes_on = not (terminated or truncated)
    for name, context in contexts.items():
        if goes_on and info.get(name) is not None and not context:
            raise EnvironmentFault(
                f'info["{name}"] must have a message; without a new context leave it out'
            )
    if not (messages or any(contexts.values()) or terminated or truncated):
        raise EnvironmentFault("the episode goes on, but step returned no message to answer")
    ends_sub_agent = _read_flag(info.get("sub_agent_ends", False), 'info["sub_agent_ends"]')
    if bool(contexts["context"]) + bool(contexts["sub_agent"]) + ends_sub_agent > 1:
        raise EnvironmentFault(
            'info may have one of "context", "sub_agent" and "sub_agent_ends", got '
            f"{describe_value(sorted(map(str, info)))}"
        )
    if contexts["sub_agent"] and messages:
        raise EnvironmentFault(
            'info["sub_agent"] has all messages that the sub-agent reads; step must return no '
            f"others, got {len(messages)}"
        )
    has_parts = info.get("rewards") is not None
    rewards = check_numbers(info["rewards"], "rewards") if has_parts else {"env": reward}
    if not math.isclose(sum(rewards.values()), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise EnvironmentFault(
            f"the parts of the reward must add up to {reward}, got {sum(rewards.values())}"
        )
    return StepResult(
        messages,
        reward,
        terminated,
        truncated,
        rewards,
        check_numbers(info.get("metrics"), "metrics"),
        read_state_key(info),
        **contexts,
        ends_sub_agent=ends_sub_agent,
    )


def check_reset(result: Any) -> tuple[tuple[Message, ...], Mapping[str, Any]]:
    """Return the checked result of `Environment.reset`: at least one message, and info."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise EnvironmentFault(f"reset must return (messages, info), got {describe_value(result)}")
    messages = read_messages(result[0])
    if not messages:
        raise EnvironmentFault("reset returned no message for the prompt")
    info = {} if result[1] is None else result[1]
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info must be a dict, got {describe_value(info)}")
    return messages, info


def read_state_key(info: Mapping[str, Any]) -> str | None:
    """Return 32 letters for info["state_key"], equal for equal keys; None if there is none.

    Raises: EnvironmentFault for anything but a text or a whole number.
    """
    key = info.get("state_key")
    if key is None:
        return None
    if isinstance(key, bool) or not isinstance(key, str | int | np.integer):
        raise EnvironmentFault(
            'info["state_key"] must be a text or a whole number, equal for equal states, got '
            f"{describe_value(key)}"
        )
    # A state may be a long text, and every process gets the keys of all episodes.
    text = key.encode("utf-8", "replace") if isinstance(key, str) else b"%d" % int(key)
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def check_numbers(values: Any, label: str) -> dict[str, float]:
    """Return rewards or metrics by name, such as those that `Environment.close` returns.

    None becomes {}. Raises: EnvironmentFault for anything but finite numbers by name.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise EnvironmentFault(f"{label} must be a dict of numbers, got {describe_value(values)}")
    return {
        str(name)[:100]: check_number(value, f"{label}[{str(name)[:100]!r}]")
        for name, value in values.items()
    }


def add_numbers(*parts: Mapping[str, float]) -> dict[str, float]:
    """The sums of values of the same name."""
    totals: dict[str, float] = {}
    for values in parts:
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def check_number(value: Any, label: str) -> float:
    """Return a number of Python, numpy or torch, at most MAX_NUMBER in size.

    Raises: EnvironmentFault for the others: rewards are float32 on the device, and their sums must
    be finite.
    """
    is_array = isinstance(value, np.ndarray) and value.size > 1
    if not is_array and (isinstance(value, numbers.Real | np.bool_) or _is_scalar(value)):
        try:
            number = float(value)
        except Exception as error:  # a number of somebody else's class
            raise EnvironmentFault(
                f"{label} has no value: {type(error).__name__} {read_text(error)[:200]}"
            ) from error
        if abs(number) <= MAX_NUMBER:  # False for NaN
            return number
    raise EnvironmentFault(
        f"{label} must be a finite number of at most {MAX_NUMBER:g}, got {describe_value(value)}"
    )


def read_messages(value: Any) -> tuple[Message, ...]:
    """Return messages: a list of `Message` or {"role": …, "content": …}; a text is a user's.

    None and "" are no message. Half a surrogate pair becomes a question mark, because no
    tokenizer accepts it.

    Raises: EnvironmentFault for anything else, and for more than MAX_CHARS or MAX_MESSAGES.
    """
    if value is None or (isinstance(value, str) and not value):
        return ()
    if isinstance(value, str | Message | Mapping):
        value = [value]
    if not isinstance(value, tuple | list) or len(value) > MAX_MESSAGES:
        raise EnvironmentFault(
            f"messages must be a list of at most {MAX_MESSAGES} messages, got "
            f"{describe_value(value)}"
        )
    messages = tuple(map(_read_message, value))
    n_chars = sum(len(message.content) for message in messages)
    if n_chars > MAX_CHARS:
        raise EnvironmentFault(
            f"the messages of a reply may have {MAX_CHARS:,} characters, got {n_chars:,}"
        )
    return messages


def clean_text(text: str) -> str:
    """Replace what no tokenizer accepts: halves of surrogate pairs."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def describe_value(value: Any) -> str:
    """A short description of any value, for messages."""
    kind = type(value).__name__
    if isinstance(value, str | bytes | bytearray | tuple | list | dict):
        kind += f" of length {len(value)}"
    try:
        short = value[:_EXCERPT_CHARS] if isinstance(value, str | bytes | bytearray) else value
        return f"{kind} {_REPR.repr(short)[:_EXCERPT_CHARS]}"
    except Exception:  # a __repr__ of somebody else's
        return kind


def _read_message(value: Any) -> Message:
    if isinstance(value, str):
        return Message("user", clean_text(value))
    names = ("role", "content", *_HEADER_FIELDS)
    fields: dict[str, Any] = {"role": None}
    if isinstance(value, Mapping):  # a missing name is "", as None is
        fields = {name: "" if value.get(name) is None else value[name] for name in names}
    elif isinstance(value, Message):
        fields = {name: getattr(value, name) for name in names}
    if not isinstance(fields["role"], str) or fields["role"] not in _ROLES:
        raise EnvironmentFault(
            f"a message must have a role ({', '.join(_ROLES)}) and a content, got "
            f"{describe_value(value)}"
        )
    if not isinstance(fields["content"], str):
        raise EnvironmentFault(
            f"the content of a message must be a text, got {describe_value(fields['content'])}"
        )
    if fields["role"] == "tool" and not fields["name"]:
        raise EnvironmentFault("a message of a tool must have its name, such as functions.search")
    for name in _HEADER_FIELDS:
        if not isinstance(fields[name], str) or not _HEADER.fullmatch(fields[name]):
            raise EnvironmentFault(
                f"a message's {name} must be a word without spaces, got "
                f"{describe_value(fields[name])}"
            )
    return Message(**fields | {"content": clean_text(fields["content"])})


def _read_flag(value: Any, label: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise EnvironmentFault(f"{label} must be True or False, got {describe_value(value)}")


def _is_scalar(value: Any) -> bool:
    """True for a number of a library, such as an array of shape ()."""
    return getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "__float__")
