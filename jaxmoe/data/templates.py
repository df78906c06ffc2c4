# SPDX-License-Identifier: Apache-2.0
"""From a row to the tokens of its prompt: by a text with places in it, or by GPT-OSS's harmony.

Markup is made of special ids and content of plain ones, whatever a row says.
Next: jaxmoe/data/harmony.py reads what the policy makes of it.
"""

from dataclasses import dataclass

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Message, Row
from jaxmoe.data.tokenizer import Tokenizer

HARMONY = "harmony"
_QUESTION, _SYSTEM = "{question}", "{system}"


@dataclass(frozen=True)
class Template:
    """How rows are put to the policy.

    text: the prompt, "{question}" standing for the row's question, "{system}" (at most once) for
        its system prompt; special strings of the text become special ids, those in a row stay
        text. Or "harmony".
    system: of rows without their own.
    reasoning_effort: low, medium or high; of harmony alone.

    Raises: ConfigError for a text without its places.
    """

    text: str
    system: str = ""
    reasoning_effort: str = "medium"

    def __post_init__(self) -> None:
        if self.text == HARMONY:
            return
        if self.text.count(_QUESTION) != 1 or self.text.count(_SYSTEM) > 1:
            raise ConfigError(
                f"data.template must hold {_QUESTION} exactly once, and {_SYSTEM} at most once, or "
                f"be harmony; got {self.text!r}. Try --set data.template='{_QUESTION}'."
            )
        if self.system and _SYSTEM not in self.text:
            raise ConfigError(
                f"data.system needs a place: data.template must hold {_SYSTEM}, or be harmony; got "
                f"{self.text!r}. Try --set 'data.template={_SYSTEM} {_QUESTION}'."
            )

    def render(self, row: Row, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """(text, tokens) of the prompt.

        Raises ConfigError for a row with a system prompt, or a chat, that the text has no place
        for; and where the tokenizer has not harmony's special tokens.
        """
        pieces = self._harmony(row, tokenizer) if self.text == HARMONY else self._filled(row)
        tokens = [
            i for piece, markup in pieces if piece for i in tokenizer.encode(piece, specials=markup)
        ]
        return "".join(piece for piece, _ in pieces), tokens

    def _filled(self, row: Row) -> list[tuple[str, bool]]:
        """(text, whether it is markup), in order."""
        if row.earlier:
            raise ConfigError(
                f"data.template must be harmony for a chat of several turns, as in {_named(row)}; "
                "a text has a place for one question. Try --set data.template=harmony."
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


def _split(piece: str, place: str, content: str) -> list[tuple[str, bool]]:
    before, found, after = piece.partition(place)
    return [(before, True), (content, False), (after, True)] if found else [(piece, True)]


def _named(row: Row) -> str:
    return row.where or repr(row.question[:60])
