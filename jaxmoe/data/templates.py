# SPDX-License-Identifier: Apache-2.0
"""From a row to the tokens of its prompt: by a text with places, a chat template, or harmony.

Markup is made of special ids and content of plain ones, whatever a row says.
Next: jaxmoe/data/harmony.py reads what the policy makes of it.
"""

import re
from dataclasses import dataclass, replace

from jaxmoe.config import ConfigError
from jaxmoe.data.chat_template import ChatTemplate
from jaxmoe.data.rows import Message, Row
from jaxmoe.data.tokenizer import Tokenizer

AUTO, CHAT, HARMONY = "auto", "chat", "harmony"
_QUESTION, _SYSTEM = "{question}", "{system}"
# characters that no text may use, each in the place of a special string inside a row
_STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

_OTHERS = "Try --set data.template=harmony, or --set 'data.template={question}'"


@dataclass(frozen=True)
class Template:
    """How rows are put to the policy.

    text: the prompt, "{question}" standing for the row's question, "{system}" (at most once) for
        its system prompt; special strings of the text become special ids, those in a row stay
        text. Or "harmony"; or "chat", by the tokenizer's chat template; or "auto", which is
        "chat" for rows that are chats and "{question}" for the others.
    system: of rows without their own.
    reasoning_effort: low, medium or high; for harmony, and for chat templates that ask for it.
    chat: the tokenizer's chat template, None where it has none.

    Raises: ConfigError for a text without its places, and for "chat" where there is none.
    """

    text: str
    system: str = ""
    reasoning_effort: str = "medium"
    chat: ChatTemplate | None = None

    def __post_init__(self) -> None:
        if self.text in (HARMONY, AUTO):
            return
        if self.text == CHAT:
            if self.chat is None:
                raise ConfigError(
                    "data.template=chat needs a tokenizer with a chat template, "
                    "chat_template.jinja or a chat_template in tokenizer_config.json. "
                    f"{_OTHERS}."
                )
            return
        if self.text.count(_QUESTION) != 1 or self.text.count(_SYSTEM) > 1:
            raise ConfigError(
                f"data.template must hold {_QUESTION} exactly once, and {_SYSTEM} at most once, or "
                f"be auto, chat or harmony; got {self.text!r}. "
                f"Try --set data.template='{_QUESTION}'."
            )
        if self.system and _SYSTEM not in self.text:
            raise _no_place(self.text)

    def render(self, row: Row, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """(text, tokens) of the prompt.

        Raises ConfigError for a row with a system prompt, or a chat, that the text has no place
        for or the chat template refuses; and where the tokenizer has not harmony's special
        tokens.
        """
        if self.text == CHAT or (self.text == AUTO and row.chat):
            return self._by_chat_template(row, tokenizer)
        if self.text == AUTO:
            if self.system and not row.system:
                raise _no_place(_QUESTION)
            plain = replace(self, text=_QUESTION, system="")
            return plain.render(row, tokenizer)
        pieces = self._harmony(row, tokenizer) if self.text == HARMONY else self._filled(row)
        tokens = [
            i for piece, markup in pieces if piece for i in tokenizer.encode(piece, specials=markup)
        ]
        return "".join(piece for piece, _ in pieces), tokens

    def _by_chat_template(self, row: Row, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Render as transformers' apply_chat_template, but keep special strings of the row as text.

        Such strings are rendered as stand-ins, so that those which remain are the template's.
        """
        if self.chat is None:
            raise ConfigError(
                f"{_named(row)} is a chat, and the tokenizer has no chat template to render it. "
                f"{_OTHERS}."
            )
        chat = [*row.earlier, Message("user", row.question)]
        if system := row.system or self.system:
            chat.insert(0, Message("system", system))
        text = self._rendered(chat, row)
        names = sorted(filter(None, tokenizer.special_names), key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        inside = {name for turn in chat for name in special.findall(turn.content)}
        tokens = tokenizer.encode(text, specials=True)
        ids = {tokenizer.special(name) for name in names}
        meant = [tokenizer.special(name) for name in special.findall(text)]
        if not inside and [i for i in tokens if i in ids] == meant:
            return text, tokens
        back = dict(zip(_STAND_INS, sorted(inside), strict=False))
        forth = {name: mark for mark, name in back.items()}
        used = any(mark in turn.content for mark in back for turn in chat)
        if not used and len(forth) == len(inside):
            hidden = [
                replace(turn, content=special.sub(lambda found: forth[found[0]], turn.content))
                for turn in chat
            ]
            marked = self._rendered(hidden, row)
            if _restored(marked, back) == text:
                return text, _encoded(marked, special, back, tokenizer)
        raise ConfigError(
            f"{_named(row)} holds {', '.join(sorted(inside))[:60]}, which the tokenizer's chat "
            "template does not leave as it is: it cannot be told from the template's own. Take it "
            f"out of the row. Or {_OTHERS[0].lower()}{_OTHERS[1:]}."
        )

    def _rendered(self, chat: list[Message], row: Row) -> str:
        assert self.chat is not None
        try:
            return self.chat.render(chat, reasoning_effort=self.reasoning_effort)
        except ConfigError as error:
            raise ConfigError(
                f"the tokenizer's chat template must render {_named(row)}; it says: {error}. "
                f"{_OTHERS}."
            ) from error

    def _filled(self, row: Row) -> list[tuple[str, bool]]:
        """(text, whether it is markup), in order."""
        if row.earlier:
            raise ConfigError(
                f"data.template must be chat or harmony for a chat of several turns, as in "
                f"{_named(row)}; a text has a place for one question. "
                "Try --set data.template=harmony."
            )
        if row.system and _SYSTEM not in self.text:
            raise ConfigError(
                f"data.template must hold {_SYSTEM}, or be harmony, for a row with a system "
                f"prompt, as {_named(row)}; got {self.text!r}. Try --set data.template=harmony."
            )
        given = {_QUESTION: row.question, _SYSTEM: row.system or self.system}
        pieces = [(self.text, True)]
        for place, content in given.items():
            pieces = [
                part for piece, markup in pieces
                for part in (_split(piece, place, content) if markup else [(piece, markup)])
            ]  # fmt: skip
        return pieces

    def _harmony(self, row: Row, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
        """As openai-harmony renders it: the model's own system message, ours as the developer's.

        No date is in it: a prompt is the same each time it is read.
        """
        for name in ("<|start|>", "<|message|>", "<|end|>", "<|channel|>"):
            tokenizer.special(name)  # raises where there is none
        model = (
            "You are ChatGPT, a large language model trained by OpenAI.\n"
            f"Knowledge cutoff: 2024-06\n\nReasoning: {self.reasoning_effort}\n\n"
            "# Valid channels: analysis, commentary, final. "
            "Channel must be included for every message."
        )
        turns = [Message("system", model)]
        if told := row.system or self.system:
            turns.append(Message("developer", f"# Instructions\n\n{told}"))
        pieces = []
        for turn in [*turns, *row.earlier, Message("user", row.question)]:
            pieces += [("<|start|>", True), (turn.role, False)]
            if turn.role == "assistant":
                pieces += [("<|channel|>", True), ("final", False)]
            pieces += [("<|message|>", True), (turn.content, False), ("<|end|>", True)]
        return [*pieces, ("<|start|>", True), ("assistant", False)]


def _restored(text: str, back: dict[str, str]) -> str:
    return text.translate(str.maketrans(back))


def _encoded(
    marked: str, special: re.Pattern[str], back: dict[str, str], tokenizer: Tokenizer
) -> list[int]:
    """Special ids for the special strings that are left, plain ids for all between them."""
    tokens: list[int] = []
    at = 0
    for found in [*special.finditer(marked), None]:
        end = len(marked) if found is None else found.start()
        if piece := _restored(marked[at:end], back):
            tokens += tokenizer.encode(piece)
        if found is not None:
            tokens.append(tokenizer.special(found[0]))
            at = found.end()
    return tokens


def _no_place(text: str) -> ConfigError:
    return ConfigError(
        f"data.system needs a place: data.template must hold {_SYSTEM}, or be chat or harmony; got "
        f"{text!r}. Try --set 'data.template={_SYSTEM} {_QUESTION}'."
    )


def _split(piece: str, place: str, content: str) -> list[tuple[str, bool]]:
    before, found, after = piece.partition(place)
    return [(before, True), (content, False), (after, True)] if found else [(piece, True)]


def _named(row: Row) -> str:
    return row.where or repr(row.question[:60])
