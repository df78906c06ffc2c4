# SPDX-License-Identifier: Apache-2.0
"""The environment that answers calls of tools, and passes other turns to an environment inside.

Next: jaxmoe/environments/tools.py makes one call.
"""

from collections import Counter
from collections.abc import Sequence

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.tools import tool_recipient
from jaxmoe.data.rows import Message, Row, ToolDescription, prompt_messages
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.environment import Environment, Unchecked
from jaxmoe.environments.step_check import add_numbers, check_numbers, check_step
from jaxmoe.environments.tools import Tool, ToolResult, answer_step, answer_unknown, call_tool
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
        call = messages[-1] if messages else None
        if call is not None and call.recipient and not self._is_inner_call(call.recipient):
            result = self._answer_call(call)
        elif self._inner is None:
            result = [], 0.0, True, False, {"rewards": {}}
        else:
            result = wait_for_result(self._inner.step(messages))
        if not earlier:
            return result
        last = check_step(result)
        parts = [*earlier, last]
        info = {
            "rewards": add_numbers(*(part.rewards for part in parts)),
            "metrics": add_numbers(*(part.metrics for part in parts)),
            "state_key": last.state_key,
            "context": last.context or None,
            "sub_agent": last.sub_agent or None,
            "sub_agent_ends": last.ends_sub_agent,
        }
        replies = [message for part in parts for message in part.messages]
        reward = sum(part.reward for part in parts)
        return replies, reward, last.terminated, last.truncated, info

    def _answer_earlier_call(self, call: Message) -> Unchecked:
        """Answer a call that is not the last message of its turn."""
        if not self._is_inner_call(call.recipient):
            return self._answer_call(call)
        text = "Error: this call was not made, since other messages follow it. End the turn with it"
        return answer_step(call, ToolResult(text, is_error=True))

    def close(self) -> Unchecked:
        """Close the tools and the inner environment, all of them even if one fails.

        Returns the sums of their rewards, by part.
        """
        rewards: dict[str, float] = {}
        errors: list[Exception] = []
        closers = [tool.close for tool in self._started.values() if tool.close is not None]
        if self._inner is not None:
            closers.append(self._inner.close)
        self._started = {}
        for close in closers:
            try:
                with user_code():
                    part = check_numbers(wait_for_result(close()), "the rewards of close")
                rewards = add_numbers(rewards, part)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return rewards

    def _is_inner_call(self, recipient: str) -> bool:
        if self._inner is None or recipient in self._fixed:
            return False
        return recipient in {tool_recipient(tool.name) for tool in self._inner.tools}

    def _answer_call(self, call: Message) -> Unchecked:
        tool = self._started.get(call.recipient)
        if tool is not None:
            return answer_step(call, call_tool(tool, call.content))
        inner_tools = () if self._inner is None else self._inner.tools
        addresses = [*self._fixed, *(tool_recipient(tool.name) for tool in inner_tools)]
        return answer_step(call, answer_unknown(call.recipient, addresses), is_unknown=True)
