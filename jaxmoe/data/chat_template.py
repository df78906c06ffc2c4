# SPDX-License-Identifier: Apache-2.0
"""The chat template that comes with a tokenizer, rendered exactly as transformers renders it.

A template is a program written by the author of the checkpoint, so it runs in Jinja's sandbox.
Next: jaxmoe/data/templates.py decides which rows use it.
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
from jaxmoe.data.rows import Message, ToolDescription

_MAX_TEMPLATE_BYTES = 1_000_000  # bytes of a template; published ones have up to 30,000
_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, and the special tokens that it may name.

    time: the time that the template's strftime_now returns. It is fixed once per process, so that
        a row renders the same each time it is read.
    """

    text: str
    tokens: Mapping[str, str]
    time: datetime.datetime = field(default_factory=datetime.datetime.now)

    def render(
        self, chat: Sequence[Message], tools: Sequence[ToolDescription] = (), **variables: Any
    ) -> str:
        """The prompt of a chat, up to the start of the assistant's turn.

        tools: given to the template in OpenAI's format.

        Raises: ConfigError if the template fails or refuses the chat.
        """
        turns = [{"role": turn.role, "content": turn.content} for turn in chat]
        try:
            return self._compiled_template.render(
                messages=turns,
                tools=[_openai_tool(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=True,
                **{**self.tokens, **variables},
            )
        except Exception as error:  # the template is foreign code and may raise anything
            raise ConfigError(f"{str(error) or type(error).__name__}".splitlines()[0]) from error

    @property
    def digest(self) -> str:
        """Digest of the text and tokens. Equal digests render chats alike, except for the date."""
        content = json.dumps([self.text, dict(self.tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        return _make_environment(self.time).from_string(self.text)


def _openai_tool(tool: ToolDescription) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def load_chat_template(spec: str) -> ChatTemplate | None:
    """The chat template in the folder of a tokenizer; None if there is none.

    Reads chat_template.jinja, else chat_template of tokenizer_config.json (of several templates,
    the one named "default").

    spec: init.tokenizer of the config.
    Raises: ConfigError for a file that cannot be read.
    """
    path = Path(spec)
    folder = path if path.is_dir() else path.parent
    if spec == "bytes":
        return None
    settings = _read_json_object(folder / "tokenizer_config.json")
    text = settings.get("chat_template")
    if isinstance(text, list):
        named = [t for t in text if isinstance(t, dict) and t.get("name") == "default"]
        text = named[0].get("template") if named else None
    file = folder / "chat_template.jinja"
    if file.is_file():
        text = _read_text(file)
    if not isinstance(text, str):
        return None
    specials = _read_json_object(folder / "special_tokens_map.json") | settings
    tokens = {name: _token_text(specials[name]) for name in _TOKEN_NAMES if specials.get(name)}
    return ChatTemplate(text, tokens)


def _make_environment(time: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """A sandbox with the settings, filters and functions that transformers gives its templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=time.strftime,
        dict=_new_dict,
        namespace=_SafeNamespace,
    )
    return environment


class _GenerationTag(Extension):
    """Support for {% generation %}, which marks the assistant's text; rendered without marks."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A Jinja namespace that rejects names with a leading underscore, such as __class__."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace must not hold {name!r}")
        super().__setitem__(name, value)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes that Jinja's own `tojson` filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _read_json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = parse_json(_read_text(file))
    except ValueError as error:
        raise ConfigError(f"{file} must be JSON; {error}. Copy it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must be a JSON object. Copy it again.")
    return value


def _read_text(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix == ".jinja" and len(content) > _MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"{file} must have at most {_MAX_TEMPLATE_BYTES:,} bytes; it has {len(content):,}."
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} must be UTF-8; {error}. Copy it again.") from error
