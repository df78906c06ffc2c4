# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, by UTF-8 bytes or by a Hugging Face tokenizer.json.

Both know the same special strings, so one code path serves a toy model and a real one. Text is
untrusted (prompts, tool output): a special string inside it stays plain text unless the caller
asks for specials. Next: jaxmoe/data/scoring.py.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxmoe.config import ConfigError
from jaxmoe.config.file_sums import check_file_sums
from jaxmoe.config.json_object import parse_json_object
from jaxmoe.data.end_tokens import end_tokens

SPECIALS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
_BYTES = 256
_SPECIAL_IDS = {name: _BYTES + i for i, name in enumerate(SPECIALS)}
_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(name) for name in SPECIALS) + ")")
_END_NAMES = ("<|endoftext|>", "</s>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<eos>")

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the code may ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The highest id + 1."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the policy's turn, the usual one first: <|return|>, <|call|>, and others."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def special_names(self) -> tuple[str, ...]:
        """Strings that `encode` makes single ids of, where specials are asked for."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of a text; only with `specials` do special strings become special ids."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, specials included; never raises, bad UTF-8 becomes U+FFFD."""
        ...

    def special(self, name: str) -> int:
        """The id of a special string. Raises ConfigError where the tokenizer has none."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """265 ids: byte b is id b, then the nine harmony specials."""

    vocab_size: int = _BYTES + len(SPECIALS)
    stop_ids: tuple[int, ...] = (_SPECIAL_IDS["<|return|>"], _SPECIAL_IDS["<|call|>"])
    pad_id: int = _SPECIAL_IDS["<|endoftext|>"]
    special_names: tuple[str, ...] = SPECIALS

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        if not specials:
            return list(_utf8(text))
        ids: list[int] = []
        for piece in _SPECIAL_PATTERN.split(text):
            ids += [_SPECIAL_IDS[piece]] if piece in _SPECIAL_IDS else _utf8(piece)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[bytes] = []
        for i in ids:
            if 0 <= i < _BYTES:
                parts.append(bytes((i,)))
            elif i < self.vocab_size and i > 0:
                parts.append(SPECIALS[i - _BYTES].encode())
            else:
                parts.append(b"\xff")  # no such id: shown as U+FFFD
        return b"".join(parts).decode("utf-8", errors="replace")

    def special(self, name: str) -> int:
        return _known(name, _SPECIAL_IDS)


class HFTokenizer:
    """A tokenizer.json, or the directory that holds one.

    `stop_ids` are <|return|> and <|call|>; a file without both stops at its end-of-text token
    instead: eos_token of the tokenizer_config.json beside it, else the first usual name it has.
    Behind them come `ends`, and what the generation_config.json beside the file lists.
    `pad_id` is <|endoftext|>, else the first stop id.

    Raises: ConfigError for a path or a file that does not hold a tokenizer, and for a file of our
    exports that has other bytes than were written.
    """

    def __init__(self, path: str | Path, *, ends: Iterable[int] = ()) -> None:
        file = _tokenizer_file(Path(path))
        check_file_sums(file.parent)
        try:
            text = file.read_text(encoding="utf-8")
            self._marked = tokenizers.Tokenizer.from_str(text)
            self._plain = tokenizers.Tokenizer.from_str(_all_special(text, self._marked))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(
                f"init.tokenizer must be a tokenizer.json; {file} is not one ({error}). "
                "Try --set init.tokenizer=bytes."
            ) from error
        self._plain.encode_special_tokens = True
        for tokenizer in (self._marked, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        vocab = self._marked.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError(f"init.tokenizer must have tokens; {file} has none. Try another one.")
        self._specials = {
            token.content: i for i, token in self._marked.get_added_tokens_decoder().items()
        }
        self.special_names = tuple(self._specials)
        self.vocab_size = max(vocab.values()) + 1
        stops = ("<|return|>", "<|call|>")
        if all(name in self._specials for name in stops):
            self.stop_ids = tuple(self._specials[name] for name in stops)
        else:
            self.stop_ids = (_end_of_text(file, vocab),)
        more = [i for i in (*ends, *end_tokens(file.parent)) if i < self.vocab_size]
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *more)))
        self.pad_id = self._specials.get("<|endoftext|>", self.stop_ids[0])
        harmony = {self._specials[name] for name in SPECIALS if name in self._specials}
        self._never_plain = harmony.union(self.stop_ids)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        tokenizer = self._marked if specials else self._plain
        try:
            ids = tokenizer.encode(_valid(text), add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises bare Exception: a word without its unk, say
            raise ConfigError(
                f"init.tokenizer must have tokens for every text; {error}, for {text!r:.60}. "
                "Try another tokenizer.json."
            ) from error
        if not specials and not self._never_plain.isdisjoint(ids):
            name = self._marked.id_to_token(next(i for i in ids if i in self._never_plain))
            raise ConfigError(
                f"init.tokenizer must take {name!r} within a text as text, and makes it the token "
                "that ends a turn or speaks to the policy. List it in tokenizer.json's "
                "added_tokens, or remove it from the rows."
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return self._marked.decode(known, skip_special_tokens=False)

    def special(self, name: str) -> int:
        return _known(name, self._specials)


def load_tokenizer(spec: str, checkpoint: str = "") -> Tokenizer:
    """The tokenizer a config names: "bytes", a tokenizer.json, or the directory of one.

    It also stops at the end tokens that the checkpoint's folder lists, where one is given.
    Raises: ConfigError where there is no such file.
    """
    if spec == "bytes":
        return ByteTokenizer()
    return HFTokenizer(spec, ends=end_tokens(Path(checkpoint)) if checkpoint else ())


def tokenizer_digest(spec: str, checkpoint: str = "") -> str:
    """Equal where text becomes the same ids, and the same ids end a turn."""
    if spec == "bytes":
        return spec
    found = hashlib.sha256(_tokenizer_file(Path(spec)).read_bytes())
    found.update(repr(load_tokenizer(spec, checkpoint).stop_ids).encode())
    return found.hexdigest()[:16]


def write_tokenizer(spec: str, directory: Path) -> None:
    """The files of the tokenizer that a config names, its chat template among them."""
    if spec == "bytes":
        write_byte_tokenizer(directory)
        return
    file = _tokenizer_file(Path(spec))
    shutil.copyfile(file, directory / "tokenizer.json")
    for name in _BESIDE:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, directory / name)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError unless every id of the tokenizer has a row in the model's embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size ({vocab_size}) must be at least the tokenizer's "
            f"{tokenizer.vocab_size} ids. Try --set model.vocab_size={tokenizer.vocab_size}."
        )


def write_byte_tokenizer(directory: str | Path) -> Path:
    """Write ByteTokenizer as tokenizer.json (and its config), for engines that load such files.

    Returns: the path of tokenizer.json. A byte-pair vocabulary with no merges gives the same ids.
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    vocab = {char: byte for byte, char in enumerate(_byte_characters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in SPECIALS]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return out / "tokenizer.json"


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(_BYTES) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(_BYTES + hidden.index(byte))
        for byte in range(_BYTES)
    ]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # a lone surrogate has no bytes: "?"


def _valid(text: str) -> str:
    return _utf8(text).decode("utf-8")


def _known(name: str, ids: dict[str, int]) -> int:
    if name not in ids:
        raise ConfigError(
            f"the tokenizer must have the special token {name!r}; it has {', '.join(ids)}. "
            "Try --set init.tokenizer=bytes."
        )
    return ids[name]


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            "init.tokenizer must be 'bytes', a tokenizer.json or a directory that holds one; "
            f"there is no {str(file)!r}. Try --set init.tokenizer=bytes."
        )
    return file


def _all_special(text: str, tokenizer: tokenizers.Tokenizer) -> str:
    """A tokenizer.json whose added tokens are all special: those alone can be left unread.

    Rows are anybody's text, and "special" may be false of a token that ends a turn.
    """
    if all(token.special for token in tokenizer.get_added_tokens_decoder().values()):
        return text
    whole = json.loads(text)
    for token in whole["added_tokens"]:
        token["special"] = True
    return json.dumps(whole)


def _end_of_text(file: Path, vocab: dict[str, int]) -> int:
    settings = file.parent / "tokenizer_config.json"
    names: list[str] = list(_END_NAMES)
    if settings.is_file():
        try:
            eos = parse_json_object(settings.read_bytes()).get("eos_token")
            eos = eos.get("content") if isinstance(eos, dict) else eos
            if not isinstance(eos, str | None):
                raise ValueError(f"eos_token is {eos!r:.60}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{settings} must be JSON that may name an eos_token; {error}. Copy it anew from "
                "where the tokenizer came from, or move it away."
            ) from error
        names[:0] = [] if eos is None else [eos]
    for name in names:
        if name in vocab:
            return vocab[name]
    raise ConfigError(
        f"the tokenizer must have a token that ends a turn; {file} has none of "
        f"{', '.join(('<|return|>', *_END_NAMES))}. Write eos_token into {settings}."
    )
