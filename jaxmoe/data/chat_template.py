# SPDX-License-Identifier: Apache-2.0
"""The chat template that comes with a tokenizer, rendered as transformers renders it.

A template is a program of whoever made the checkpoint, so it runs in Jinja's sandbox.
Next: jaxmoe/data/templates.py says for which rows.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json
from jaxmoe.data.rows import Message

_LONGEST = 1_000_000  # bytes of a template; published ones have up to 30,000
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, and the special tokens that it may name.

    now: what strftime_now tells a template; one moment for all rows of a process, so that a row
        is the same each time it is read.
    """

    text: str
    tokens: Mapping[str, str]
    now: datetime.datetime = field(default_factory=datetime.datetime.now)

    def render(self, chat: Sequence[Message], **variables: Any) -> str:
        """The prompt of a chat, up to where the assistant begins.

        Raises: ConfigError where the template cannot be run, or refuses the chat.
        """
        turns = [{"role": turn.role, "content": turn.content} for turn in chat]
        try:
            return self._compiled.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True,
                **{**self.tokens, **variables},
            )  # fmt: skip
        except Exception as error:  # whatever a stranger's program raises
            raise ConfigError(f"{str(error) or type(error).__name__}".splitlines()[0]) from error

    @property
    def digest(self) -> str:
        """Equal where chats are rendered alike, apart from the date."""
        content = json.dumps([self.text, dict(self.tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment(self.now).from_string(self.text)


def load_chat_template(spec: str) -> ChatTemplate | None:
    """The template beside the tokenizer that a config names; None where there is none.

    That is chat_template.jinja, or else the chat_template of tokenizer_config.json, of several
    the one called default.
    Raises: ConfigError for a file that cannot be read.
    """
    path = Path(spec)
    folder = path if path.is_dir() else path.parent
    if spec == "bytes":
        return None
    settings = _json(folder / "tokenizer_config.json")
    text = settings.get("chat_template")
    if isinstance(text, list):
        named = [t for t in text if isinstance(t, dict) and t.get("name") == "default"]
        text = named[0].get("template") if named else None
    file = folder / "chat_template.jinja"
    if file.is_file():
        text = _read(file)
    if not isinstance(text, str):
        return None
    specials = _json(folder / "special_tokens_map.json") | settings
    tokens = {name: _content(specials[name]) for name in _TOKENS if specials.get(name)}
    return ChatTemplate(text, tokens)


def _environment(now: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """With the settings, filters and functions that transformers gives its templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=now.strftime, dict=_new_dict, namespace=_Names
    )
    return environment


class _Generation(Extension):
    """{% generation %} marks what the assistant said; a prompt needs no marks."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """A namespace that keeps no name of Python's own inside."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace must not hold {name!r}")
        super().__setitem__(name, value)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Jinja's own escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = parse_json(_read(file))
    except ValueError as error:
        raise ConfigError(f"{file} must be JSON; {error}. Copy it anew.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must be a JSON object. Copy it anew.")
    return value


def _read(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix == ".jinja" and len(content) > _LONGEST:
        raise ConfigError(f"{file} must have at most {_LONGEST:,} bytes; it has {len(content):,}.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} must be UTF-8; {error}. Copy it anew.") from error
