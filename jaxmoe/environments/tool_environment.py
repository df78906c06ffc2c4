# SPDX-License-Identifier: Apache-2.0
"""The environment that answers calls of tools, and passes other turns to an environment inside.

Next: jaxmoe/environments/tools.py makes one call.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.tools import called_tool, tool_recipient
from jaxmoe.data.rows import Message, Row, ToolDescription, prompt_messages
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.environment import Environment, Unchecked
from jaxmoe.environments.step_check import add_numbers, check_numbers, check_step
from jaxmoe.environments.tools import Tool, ToolResult, answer_unknown, call_tool, reply_message
from jaxmoe.user_code import user_code


class ToolEnvironment:
    """One episode with tools.

    Each message with a recipient is a call. The calls of a turn are answered in order by the text
    of the tool, and the metrics tool/calls, tool/errors (calls that got an error text) and
    tool/unknown (those among them that named no tool) count them. Turns that end in no call, or in
    a call of a tool that the inner environment declares, are the inner environment's; without
    one, the episode terminates there.
    """

    def __init__(
        self, tools: Sequence[Tool], inner: Environment | None = None, system: str = ""
    ) -> None:
        self._all_tools = tuple(tools)
        self._inner = inner
        self._system = system  # of prompts without an inner environment
        self._started: dict[str, Tool] = {}
        self._fixed = {tool.address: tool for tool in tools}

    @property
    def tools(self) -> Sequence[ToolDescription]:
        inner_tools = () if self._inner is None else self._inner.tools
        return (*(tool.description for tool in self._all_tools), *inner_tools)

    def check_row(self, row: Row) -> None:
        check = getattr(self._inner, "check_row", None)
        if check is not None:
            check(row)

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        self._started = {}
        for address, tool in self._fixed.items():
            self._started[address] = tool if tool.start is None else tool.start(row)
        if self._inner is None:
            return prompt_messages(row, self._system), {}
        messages, info = wait_for_result(self._inner.reset(row, seed=seed))
        repeated = [name for name, n in Counter(tool.name for tool in self.tools).items() if n > 1]
        if repeated:
            raise ConfigError(
                f"data.tools: the environment has a tool {repeated[0]} too. Take it out of "
                "data.tools, or rename its function."
            )
        return messages, info

    def step(self, messages: list[Message]) -> Unchecked:
        earlier = [
            check_step(self._answer_earlier_call(message))
            for message in messages[:-1]
            if message.recipient
        ]
        result = self._answer_end(messages)
        if not earlier:
            return result
        last = check_step(result)
        parts = [*earlier, last]
        info = {
            "rewards": add_numbers(*(part.rewards for part in parts)),
            "metrics": add_numbers(*(part.metrics for part in parts)),
            "state_key": last.state_key,
        }
        replies = [message for part in parts for message in part.messages]
        reward = sum(part.reward for part in parts)
        return replies, reward, last.terminated, last.truncated, info

    def _answer_earlier_call(self, call: Message) -> Unchecked:
        """Answer a call that is not the last message of its turn."""
        if not self._is_inner_call(call.recipient):
            return self._answer_call(call)
        text = "Error: this call was not made, since other messages follow it. End the turn with it"
        result = ToolResult(text, is_error=True)
        counts = {"tool/calls": 1.0, "tool/errors": 1.0}
        return [reply_message(call, result)], 0.0, False, False, {"metrics": counts, "rewards": {}}

    def _answer_end(self, messages: list[Message]) -> Unchecked:
        call = messages[-1] if messages else None
        if call is not None and call.recipient and not self._is_inner_call(call.recipient):
            return self._answer_call(call)
        if self._inner is None:
            return [], 0.0, True, False, {"rewards": {}}
        return wait_for_result(self._inner.step(messages))

    def close(self) -> Unchecked:
        """Close the tools and the inner environment, all of them even if one fails."""
        rewards: dict[str, float] = {}
        errors: list[Exception] = []
        closers = [tool.close for tool in self._started.values() if tool.close is not None]
        if self._inner is not None:
            closers.append(self._inner.close)
        self._started = {}
        for close in closers:
            try:
                with user_code():
                    rewards |= check_numbers(wait_for_result(close()), "the rewards of close")
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return rewards

    def _is_inner_call(self, recipient: str) -> bool:
        if self._inner is None or recipient in self._fixed:
            return False
        return recipient in {tool_recipient(tool.name) for tool in self._inner.tools}

    def _list_addresses(self) -> list[str]:
        inner_tools = () if self._inner is None else self._inner.tools
        return [*self._fixed, *(tool_recipient(tool.name) for tool in inner_tools)]

    def _answer_call(
        self, call: Message
    ) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        tool = self._started.get(call.recipient)
        is_unknown = tool is None
        result = (
            answer_unknown(call.recipient, self._list_addresses())
            if tool is None
            else call_tool(tool, call.content)
        )
        metrics = {
            **result.metrics,
            "tool/calls": 1.0,
            "tool/errors": float(result.is_error),
            "tool/unknown": float(is_unknown),
        }
        part = f"tool/{called_tool(call.recipient)}"
        rewards = {part: result.reward} if result.reward else {}
        info = {"metrics": metrics, "rewards": rewards}
        return [reply_message(call, result)], result.reward, False, False, info
