# SPDX-License-Identifier: Apache-2.0
"""A tool that the policy may call, and one call of it: arguments in, a text out.

What a policy can write never raises: bad arguments, an unknown tool and an exception of the tool
become a short text for the policy. Next: jaxmoe/environments/tool_environment.py.
"""

import asyncio
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.data.harmony.tools import called_tool, tool_recipient
from jaxmoe.data.rows import Message, Row, ToolDescription
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.step_check import EnvironmentFault, clean_text, describe_value
from jaxmoe.environments.tool_schema import check_arguments
from jaxmoe.user_code import read_text

MAX_RESULT_CHARS = 200_000  # of a result; a longer one is cut in the middle
_MAX_ERROR_CHARS = 500
_MAX_NAME_CHARS = 64
_FUNCTIONS = "functions."


@dataclass(frozen=True)
class Tool:
    """A tool, as the prompt declares it and as an episode calls it.

    call: takes the arguments by name, or, if `takes_text`, the text of the call; may be async.
        It returns a text, a number, a JSON value or a `ToolResult`.
    recipient: of its calls; "" means "functions.NAME", or "python" for that name.
    start: returns the tool of one episode, for tools that have a state of their own.
    close: ends the episode of a started tool; returns rewards by part, or None.
    """

    description: ToolDescription
    call: Callable[..., Any]
    recipient: str = ""
    takes_text: bool = False
    start: Callable[[Row], "Tool"] | None = None
    close: Callable[[], Mapping[str, float] | None] | None = None

    @property
    def address(self) -> str:
        """The recipient of its calls."""
        return self.recipient or tool_recipient(self.description.name)


@dataclass(frozen=True)
class ToolResult:
    """A result with a reward for the call, and metrics; `is_error` counts it as a failed call."""

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False


class ToolError(Exception):
    """A call that cannot be answered; the message is the text for the policy."""


def call_tool(tool: Tool, content: str) -> ToolResult:
    """Call a tool with the content of a policy's message; return the text for the policy.

    Raises: EnvironmentFault if the tool raises it, which ends the episode; nothing else.
    """
    try:
        if tool.takes_text:
            returned = tool.call(content)
        else:
            arguments = read_json_object(content)
            if (fault := check_arguments(arguments, tool.description.parameters)) is not None:
                raise ToolError(fault)
            returned = tool.call(**arguments)
        return read_result(wait_for_result(returned))
    except EnvironmentFault:
        raise
    except ToolError as error:
        return ToolResult(f"Error: {error}", is_error=True)
    except (Exception, SystemExit, GeneratorExit, asyncio.CancelledError) as error:
        return ToolResult(_describe_error(error), is_error=True)


def answer_unknown(recipient: str, addresses: Sequence[str]) -> ToolResult:
    """The text for a policy that called a tool which is not one of `addresses`."""
    close = difflib.get_close_matches(recipient, addresses, 1)
    hint = f"Did you mean {close[0]}?" if close else f"Tools: {', '.join(addresses) or 'none'}."
    return ToolResult(f"Error: there is no tool {recipient[:100]!r}. {hint}", is_error=True)


def reply_message(call: Message, result: ToolResult) -> Message:
    """The tool's message, in harmony's form: to the assistant, on the channel of the call.

    A call on the final channel, or on none that a tool has, is answered on the tool's usual one.
    """
    name = _complete_name(call.recipient)
    channel = call.channel
    if channel not in ("analysis", "commentary"):
        channel = "commentary" if name.startswith(_FUNCTIONS) else "analysis"
    return Message("tool", result.text, name=name, channel=channel, recipient="assistant")


def answer_step(
    call: Message, result: ToolResult, *, is_unknown: bool = False
) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
    """Return what an environment's `step` returns after this call: the reply, reward and counts."""
    metrics = {
        **result.metrics,
        "tool/calls": 1.0,
        "tool/errors": float(result.is_error),
        "tool/unknown": float(is_unknown),
    }
    rewards = {f"tool/{called_tool(call.recipient)}": result.reward} if result.reward else {}
    info = {"metrics": metrics, "rewards": rewards}
    return [reply_message(call, result)], result.reward, False, False, info


def _complete_name(recipient: str) -> str:
    """The author of a reply: the recipient of the call, made harmless.

    A policy may call anything, such as "user": no reply must be in that name.
    """
    if recipient != "python" and not recipient.startswith(_FUNCTIONS):
        recipient = _FUNCTIONS + recipient
    return re.sub(r"[^\w.:-]", "_", recipient)[:_MAX_NAME_CHARS]


def read_result(value: Any) -> ToolResult:
    """Return what a tool returned as a text.

    A text stays as it is, dicts and lists become JSON, an object with `text` (verl's) that text,
    other values str(value). A text of more than MAX_RESULT_CHARS is cut in the middle.

    Raises: ToolError for bytes and for values that have no text.
    """
    if isinstance(value, ToolResult):
        return dataclasses.replace(value, text=_cut_text(clean_text(value.text)))
    if not isinstance(value, str) and hasattr(value, "text"):
        value = getattr(value, "text", None) or ""
    if isinstance(value, bytes | bytearray | memoryview):
        raise ToolError(f"the tool returned {describe_value(bytes(value[:20]))}, not a text")
    if isinstance(value, dict | list | tuple):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = str(value)
    return ToolResult(_cut_text(clean_text(text)))


def read_json_object(content: str) -> dict[str, Any]:
    """The arguments that a policy wrote; {} for an empty text. Raises ToolError for other texts."""
    try:
        arguments = json.loads(content, parse_constant=_refuse_constant) if content.strip() else {}
    except RecursionError:
        raise ToolError("the arguments are nested too deeply") from None
    except ValueError as error:
        raise ToolError(f"the arguments must be a JSON object: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments must be a JSON object, got {describe_value(arguments)}")
    return arguments


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _describe_error(error: BaseException) -> str:
    text = read_text(error)
    text = f"Error: {type(error).__name__}" + (f": {text}" if text else "")
    return clean_text(text[:_MAX_ERROR_CHARS])


def _cut_text(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARS:
        return text
    half = MAX_RESULT_CHARS // 2
    n_cut = len(text) - 2 * half
    return f"{text[:half]}\n[… {n_cut:,} characters were cut …]\n{text[-half:]}"
