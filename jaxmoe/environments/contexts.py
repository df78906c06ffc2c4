# SPDX-License-Identifier: Apache-2.0
"""Contexts of an episode: what the policy reads before its next turn.

    conversation: prompt, turn, reply, turn, …            one row of training, one context
    info["context"]: the same conversation goes on in a new context
    info["sub_agent"]: a conversation inside, until info["sub_agent_ends"]; then the outer one
        goes on with the tokens that it had
    a user's reply to a final answer: the analysis before it leaves the context, as where GPT-OSS
        is served

All turns of an episode are trained on, each with the context in which it was sampled.
Next: jaxmoe/rollout/turns.py adds a new context to an episode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.render import drop_analysis, write_messages
from jaxmoe.data.rows import Message
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.environments.step_check import EnvironmentFault, StepResult
from jaxmoe.rollout.replies import NewContext, Reply

Render = Callable[[Sequence[Message]], Sequence[int]]


@dataclass
class Conversation:
    """Messages, and the tokens that the engine has of them."""

    messages: list[Message]
    tokens: list[int]

    def add(self, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        self.messages += messages
        self.tokens += tokens


@dataclass
class Contexts:
    """The conversations of an episode: its own, and those of the sub-agents that are open."""

    first: Sequence[int] = ()  # tokens of the prompt
    messages: Sequence[Message] = ()  # of the prompt
    # Tokens of a context, as those of a prompt; None: the environment may replace none.
    render: Render | None = None
    keeps_analysis: bool = True  # of earlier answers, when a user replies to a final one
    _open: list[Conversation] = field(default_factory=list)  # the innermost last

    @property
    def _conversation(self) -> Conversation:
        if not self._open:
            self._open.append(Conversation(self._select(self.messages), list(self.first)))
        return self._open[-1]

    @property
    def tokens(self) -> list[int]:
        """All tokens that the policy reads before its next turn."""
        return self._conversation.tokens

    def reply(
        self,
        turn: Sequence[int],
        turn_messages: Sequence[Message],
        replies: Sequence[Message],
        step: StepResult,
        tokenizer: Tokenizer,
    ) -> Reply:
        """Return the tokens that follow a turn, by what the environment's step said.

        replies: the messages of the step, as the policy reads them.
        Raises: EnvironmentFault if a sub-agent ends and none is open.
        """
        conversation = self._conversation
        conversation.add(turn_messages, turn)
        if step.sub_agent:
            return self._begin(step.sub_agent)
        if step.ends_sub_agent:
            if len(self._open) == 1:
                raise EnvironmentFault('info["sub_agent_ends"] needs an open sub-agent')
            self._open.pop()
            self._conversation.add(replies, write_messages(replies, tokenizer))
            return NewContext(tuple(self.tokens))
        if step.context:
            self._open.pop()
            return self._begin([*step.context, *replies])
        messages = [*conversation.messages, *replies]
        if self.render is not None and len(self._select(messages)) < len(messages):
            self._open.pop()
            return self._begin(messages)
        tokens = write_messages(replies, tokenizer)
        conversation.add(replies, tokens)
        return tokens

    def _begin(self, messages: Sequence[Message]) -> NewContext:
        assert self.render is not None
        self._open.append(Conversation(self._select(messages), list(self.render(messages))))
        return NewContext(tuple(self.tokens))

    def _select(self, messages: Sequence[Message]) -> list[Message]:
        """The messages that `render` writes."""
        return list(messages) if self.keeps_analysis else drop_analysis(messages)

    def check_allowed(self, step: StepResult) -> None:
        """Raise ConfigError for a new context that the run does not allow."""
        is_new = step.context or step.sub_agent or step.ends_sub_agent
        if is_new and self.render is None:
            raise ConfigError(
                'an environment that returns info["context"] or info["sub_agent"] needs '
                "rollout.max_episode_tokens, the limit of all contexts of an episode together, got "
                "0. Try --set rollout.max_episode_tokens=8192."
            )
