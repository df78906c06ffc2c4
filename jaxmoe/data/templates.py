# SPDX-License-Identifier: Apache-2.0
"""Render a row into the tokens of its prompt, by a format string, a chat template, or harmony.

Markup becomes special ids. The content of a row always becomes plain ids, even if it contains
the text of a special token.
Next: jaxmoe/data/harmony/parse.py parses the policy's response.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxmoe.config import ConfigError
from jaxmoe.data.chat_template import ChatTemplate
from jaxmoe.data.harmony.render import (
    ASSISTANT_OPENING,
    drop_analysis,
    encode_pieces,
    message_pieces,
)
from jaxmoe.data.harmony.tools import write_developer_text, write_system_text
from jaxmoe.data.rows import Message, Row, ToolDescription, prompt_messages
from jaxmoe.data.tokenizer import Tokenizer

AUTO, CHAT, HARMONY = "auto", "chat", "harmony"
_SYSTEM_ROLES = ("system", "developer")
_QUESTION_FIELD, _SYSTEM_FIELD = "{question}", "{system}"
# Noncharacters of Unicode, which no valid text contains. Each one replaces a special string of a
# row while the chat template renders it.
_STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

_TRY_OTHER_TEMPLATES = "Try --set data.template=harmony, or --set 'data.template={question}'"


@dataclass(frozen=True)
class Template:
    """The format of prompts.

    text: a format string with "{question}" for the row's question and "{system}" (at most once)
        for its system prompt; special strings of the text become special ids, those in a row stay
        text. Or "harmony"; or "chat" for the tokenizer's chat template; or "auto", which means
        "chat" for rows that are chats and "{question}" for other rows.
    system: system prompt of rows without their own.
    reasoning_effort: low, medium or high, for harmony and for chat templates that use it.
    chat: the tokenizer's chat template; None if it has none.
    tools: declared in harmony prompts, with those of the row. A format string is its author's, who
        declares them.
    keep_analysis: False to leave the analysis channel out before the last final message of a
        prompt, as vLLM does when it serves GPT-OSS.

    Raises: ConfigError for a text without the required fields, and for "chat" without a template.
    """

    text: str
    system: str = ""
    reasoning_effort: str = "medium"
    chat: ChatTemplate | None = None
    tools: tuple[ToolDescription, ...] = ()
    keep_analysis: bool = False

    def __post_init__(self) -> None:
        if self.tools and self.text in (AUTO, CHAT):
            raise ConfigError(
                f"data.tools needs data.template=harmony, which declares them to the policy, got "
                f"data.template={self.text}. Try --set data.template=harmony."
            )
        if self.text in (HARMONY, AUTO):
            return
        if self.text == CHAT:
            if self.chat is None:
                raise ConfigError(
                    "data.template=chat needs a tokenizer with a chat template, "
                    "chat_template.jinja or a chat_template in tokenizer_config.json. "
                    f"{_TRY_OTHER_TEMPLATES}."
                )
            return
        if self.text.count(_QUESTION_FIELD) != 1 or self.text.count(_SYSTEM_FIELD) > 1:
            raise ConfigError(
                f"data.template must hold {_QUESTION_FIELD} exactly once, and {_SYSTEM_FIELD} at "
                f"most once, or be auto, chat or harmony; got {self.text!r}. "
                f"Try --set data.template='{_QUESTION_FIELD}'."
            )
        if self.system and _SYSTEM_FIELD not in self.text:
            raise _no_system_field_error(self.text)

    def render(self, row: Row, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """(text, tokens) of the prompt.

        Raises ConfigError for a system prompt or a chat that the text has no field for or that
        the chat template refuses, and if the tokenizer lacks harmony's special tokens.
        """
        if self.text == CHAT or (self.text == AUTO and row.chat):
            return self._render_chat_template(row, tokenizer)
        if self.text == AUTO and not row.tools:
            if self.system and not row.system:
                raise _no_system_field_error(_QUESTION_FIELD)
            plain = replace(self, text=_QUESTION_FIELD, system="")
            return plain.render(row, tokenizer)
        if self.text == HARMONY:
            return self.render_messages(
                prompt_messages(row), tokenizer, add_tools(self.tools, row.tools)
            )
        if row.tools:
            raise ConfigError(
                f"data.template must be harmony or chat for a row with tools, such as "
                f"{_describe_row(row)}; a format string declares none. "
                "Try --set data.template=harmony."
            )
        pieces = self._render_text(row)
        return "".join(piece for piece, _ in pieces), encode_pieces(pieces, tokenizer)

    def render_messages(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: Sequence[ToolDescription] = (),
    ) -> tuple[str, list[int]]:
        """(text, tokens) of a harmony prompt, which ends in `<|start|>assistant`.

        A first message of the role system or developer is the developer's instructions; without
        one they are `system`. The system message is the model's standard text. The date is
        omitted, so that a prompt is the same each time it is read. A message of the assistant
        without a channel is a final one.

        Raises: ConfigError for a template other than harmony, without messages, for tools and
        messages that cannot be written, and if the tokenizer lacks harmony's special tokens.
        """
        if self.text != HARMONY:
            raise ConfigError(
                "data.template must be harmony for messages of environments and for tools, got "
                f"{self.text!r}. Try --set data.template=harmony."
            )
        if not messages:
            raise ConfigError("a prompt must have at least one message, got none.")
        return self._render_harmony(messages, tokenizer, tools)

    def _render_chat_template(self, row: Row, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Render as transformers' apply_chat_template, but keep special strings of the row as text.

        If the row contains special strings, they are replaced by stand-in characters before the
        template runs. All special strings of the result then come from the template.
        """
        if self.chat is None:
            raise ConfigError(
                f"{_describe_row(row)} is a chat, and the tokenizer has no chat template to render "
                f"it. {_TRY_OTHER_TEMPLATES}."
            )
        chat = prompt_messages(row, self.system)
        if not all(message.is_plain for message in chat):
            raise ConfigError(
                "data.template must be harmony for a chat with tool calls or channels, such as "
                f"{_describe_row(row)}. Try --set data.template=harmony."
            )
        text = self._render_chat(chat, row)
        # The longest first, because one name may be the beginning of another.
        names = sorted(filter(None, tokenizer.special_names), key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        names_in_row = {name for turn in chat for name in special.findall(turn.content)}
        tokens = tokenizer.encode(text, specials=True)
        ids = {tokenizer.special(name) for name in names}
        template_ids = [tokenizer.special(name) for name in special.findall(text)]
        # The usual case: every special id of the encoded text is the template's, so the text is
        # encoded in one piece, as transformers does.
        if not names_in_row and [i for i in tokens if i in ids] == template_ids:
            return text, tokens
        name_of = dict(zip(_STAND_INS, sorted(names_in_row), strict=False))
        stand_in_of = {name: mark for mark, name in name_of.items()}
        is_used = any(mark in turn.content for mark in name_of for turn in chat)
        if not is_used and len(stand_in_of) == len(names_in_row):
            hidden = [
                replace(
                    turn, content=special.sub(lambda match: stand_in_of[match[0]], turn.content)
                )
                for turn in chat
            ]
            marked = self._render_chat(hidden, row)
            # A template may treat a stand-in differently from the string that it replaces. The
            # results differ then, and the row is refused.
            if _restore_specials(marked, name_of) == text:
                return text, _encode_with_stand_ins(marked, special, name_of, tokenizer)
        raise ConfigError(
            f"{_describe_row(row)} holds {', '.join(sorted(names_in_row))[:60]}, which the "
            "tokenizer's chat template changes, so it cannot be distinguished from the special "
            "tokens of the template. Remove it from the row. "
            f"Or {_TRY_OTHER_TEMPLATES[0].lower()}{_TRY_OTHER_TEMPLATES[1:]}."
        )

    def _render_chat(self, chat: list[Message], row: Row) -> str:
        assert self.chat is not None
        try:
            return self.chat.render(chat, row.tools, reasoning_effort=self.reasoning_effort)
        except ConfigError as error:
            raise ConfigError(
                f"the tokenizer's chat template must render {_describe_row(row)}; it raised: "
                f"{error}. {_TRY_OTHER_TEMPLATES}."
            ) from error

    def _render_text(self, row: Row) -> list[tuple[str, bool]]:
        """(text, True if it is markup) of each part of the prompt, in order."""
        if row.earlier:
            raise ConfigError(
                f"data.template must be chat or harmony for a chat of several turns, such as "
                f"{_describe_row(row)}; a format string takes one question. "
                "Try --set data.template=harmony."
            )
        if row.system and _SYSTEM_FIELD not in self.text:
            raise ConfigError(
                f"data.template must hold {_SYSTEM_FIELD}, or be harmony, for a row with a system "
                f"prompt, such as {_describe_row(row)}; got {self.text!r}. "
                "Try --set data.template=harmony."
            )
        values = {_QUESTION_FIELD: row.question, _SYSTEM_FIELD: row.system or self.system}
        pieces = [(self.text, True)]
        for field_name, content in values.items():
            pieces = [
                part
                for piece, markup in pieces
                for part in (
                    _split_at_field(piece, field_name, content) if markup else [(piece, markup)]
                )
            ]
        return pieces

    def _render_harmony(
        self, messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[ToolDescription]
    ) -> tuple[str, list[int]]:
        system, *conversation = messages if messages[0].role in _SYSTEM_ROLES else (None, *messages)
        instructions = system.content if system else ""
        developer = write_developer_text(instructions or self.system, tools)
        prompt = [Message("system", write_system_text(self.reasoning_effort, tools))]
        prompt += [Message("developer", developer)] if developer else []
        for message in conversation:
            is_answer = message.role == "assistant" and not (message.channel or message.recipient)
            prompt.append(replace(message, channel="final") if is_answer else message)
        if not self.keep_analysis:
            prompt = drop_analysis(prompt)
        pieces = [*message_pieces(prompt), *ASSISTANT_OPENING]
        for name in ("<|channel|>", *(piece for piece, markup in pieces if markup)):
            tokenizer.special(name)  # raises ConfigError if the tokenizer lacks it
        return "".join(piece for piece, _ in pieces), encode_pieces(pieces, tokenizer)


def add_tools(
    tools: Sequence[ToolDescription], row_tools: Sequence[ToolDescription]
) -> tuple[ToolDescription, ...]:
    """The tools, then those of a row whose names are not among them."""
    names = {tool.name for tool in tools}
    return (*tools, *(tool for tool in row_tools if tool.name not in names))


def _restore_specials(text: str, name_of: dict[str, str]) -> str:
    return text.translate(str.maketrans(name_of))


def _encode_with_stand_ins(
    marked: str, special: re.Pattern[str], name_of: dict[str, str], tokenizer: Tokenizer
) -> list[int]:
    """Encode special strings as special ids and the text between them as plain ids.

    Stand-ins are replaced by the special strings of the row, which become plain ids.
    """
    tokens: list[int] = []
    start = 0
    for match in [*special.finditer(marked), None]:
        end = len(marked) if match is None else match.start()
        if piece := _restore_specials(marked[start:end], name_of):
            tokens += tokenizer.encode(piece)
        if match is not None:
            tokens.append(tokenizer.special(match[0]))
            start = match.end()
    return tokens


def _no_system_field_error(text: str) -> ConfigError:
    return ConfigError(
        f"data.system needs a field in the prompt: data.template must hold {_SYSTEM_FIELD}, or be "
        f"chat or harmony; got {text!r}. "
        f"Try --set 'data.template={_SYSTEM_FIELD} {_QUESTION_FIELD}'."
    )


def _split_at_field(piece: str, field_name: str, content: str) -> list[tuple[str, bool]]:
    before, field, after = piece.partition(field_name)
    return [(before, True), (content, False), (after, True)] if field else [(piece, True)]


def _describe_row(row: Row) -> str:
    return row.location or repr(row.question[:60])
