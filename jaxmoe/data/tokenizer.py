# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, by UTF-8 bytes or by a Hugging Face tokenizer.json.

Both have the same special tokens, so one code path serves a toy model and a real one. Text is
untrusted (prompts, tool output): a special string inside it stays plain text unless the caller
passes specials=True. Next: jaxmoe/answers/scoring.py.
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
from jaxmoe.config.lfs_pointer import check_no_lfs_pointer
from jaxmoe.data.end_tokens import read_end_tokens

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
_END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<eos>",
)

_COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer for the rest of the code."""

    @property
    def vocab_size(self) -> int:
        """The highest id + 1."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the policy's turn, the usual one first: <|return|>, <|call|>, others."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def special_names(self) -> tuple[str, ...]:
        """Strings that `encode(..., specials=True)` turns into single ids."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of a text; special strings become special ids only with specials=True."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, including specials; never raises, invalid UTF-8 becomes U+FFFD."""
        ...

    def special(self, name: str) -> int:
        """The id of a special token. Raises ConfigError if the tokenizer does not have it."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """265 ids: byte b has id b, followed by the nine special tokens of harmony."""

    vocab_size: int = _BYTES + len(SPECIALS)
    stop_ids: tuple[int, ...] = (_SPECIAL_IDS["<|return|>"], _SPECIAL_IDS["<|call|>"])
    pad_id: int = _SPECIAL_IDS["<|endoftext|>"]
    special_names: tuple[str, ...] = SPECIALS

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        if not specials:
            return list(_encode_utf8(text))
        ids: list[int] = []
        for piece in _SPECIAL_PATTERN.split(text):
            ids += [_SPECIAL_IDS[piece]] if piece in _SPECIAL_IDS else _encode_utf8(piece)
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
        return _find_special_id(name, _SPECIAL_IDS)


class HFTokenizer:
    """A tokenizer.json, or the directory that holds one.

    `stop_ids` starts with <|return|> and <|call|>. A file without both uses its end-of-text token
    instead: eos_token of tokenizer_config.json in the same folder, else the first usual name that
    it has. `extra_stop_ids` and the ids of generation_config.json in the same folder follow.
    `pad_id` is <|endoftext|>, else the first stop id.

    Raises ConfigError for a path or a file without a tokenizer, and for a file of a jaxmoe export
    whose checksum does not match.
    """

    def __init__(self, path: str | Path, *, extra_stop_ids: Iterable[int] = ()) -> None:
        file = _tokenizer_file(Path(path))
        check_file_sums(file.parent)
        check_no_lfs_pointer(file)
        try:
            text = file.read_text(encoding="utf-8")
            self._marked = tokenizers.Tokenizer.from_str(text)
            self._plain = tokenizers.Tokenizer.from_str(_mark_all_special(text, self._marked))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(
                f"init.tokenizer must be a tokenizer.json; {file} cannot be loaded ({error}). "
                "Try --set init.tokenizer=bytes."
            ) from error
        self._plain.encode_special_tokens = True
        for tokenizer in (self._marked, self._plain):
            # A tokenizer.json may ask for truncation or padding, which would change prompts without
            # a word.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        vocab = self._marked.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError(
                f"init.tokenizer must have tokens; {file} has none. Try another tokenizer.json."
            )
        self._specials = {
            token.content: i for i, token in self._marked.get_added_tokens_decoder().items()
        }
        self.special_names = tuple(self._specials)
        self.vocab_size = max(vocab.values()) + 1
        stops = ("<|return|>", "<|call|>")
        if all(name in self._specials for name in stops):
            self.stop_ids = tuple(self._specials[name] for name in stops)
        else:
            self.stop_ids = (_find_end_of_text_id(file, vocab),)
        extra_stops = [
            i for i in (*extra_stop_ids, *read_end_tokens(file.parent)) if i < self.vocab_size
        ]
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *extra_stops)))
        self.pad_id = self._specials.get("<|endoftext|>", self.stop_ids[0])
        harmony = {self._specials[name] for name in SPECIALS if name in self._specials}
        self._never_plain = harmony.union(self.stop_ids)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        tokenizer = self._marked if specials else self._plain
        try:
            # The prompt's template decides on special tokens. The file may ask for a start token as
            # well.
            ids = tokenizer.encode(_replace_invalid(text), add_special_tokens=False).ids
        # tokenizers raises bare Exception, for example for a word that is not in the vocabulary
        # of a tokenizer without an unknown token
        except Exception as error:
            raise ConfigError(
                f"init.tokenizer must be able to encode every text; {error}, for {text!r:.60}. "
                "Try another tokenizer.json."
            ) from error
        if not specials and not self._never_plain.isdisjoint(ids):
            name = self._marked.id_to_token(next(i for i in ids if i in self._never_plain))
            raise ConfigError(
                f"init.tokenizer must encode {name!r} inside a text as plain text; it encodes it "
                "as the special token that controls turns. List it in added_tokens of "
                "tokenizer.json, or remove it from the rows."
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        # A model's vocabulary may be larger than the tokenizer's, so the policy may sample ids that
        # have no text.
        valid_ids = [i for i in ids if 0 <= i < self.vocab_size]
        return self._marked.decode(valid_ids, skip_special_tokens=False)

    def special(self, name: str) -> int:
        return _find_special_id(name, self._specials)


def load_tokenizer(spec: str, checkpoint: str = "") -> Tokenizer:
    """The tokenizer that a config names: "bytes", a tokenizer.json, or the directory of one.

    checkpoint: a folder whose generation_config.json may list more stop ids; "" for none.
    Raises: ConfigError if there is no such file.
    """
    if spec == "bytes":
        return ByteTokenizer()
    return HFTokenizer(spec, extra_stop_ids=read_end_tokens(Path(checkpoint)) if checkpoint else ())


def tokenizer_digest(spec: str, checkpoint: str = "") -> str:
    """Digest of a tokenizer; equal if texts get the same ids and the same ids end a turn."""
    if spec == "bytes":
        return spec
    hasher = hashlib.sha256(_tokenizer_file(Path(spec)).read_bytes())
    hasher.update(repr(load_tokenizer(spec, checkpoint).stop_ids).encode())
    return hasher.hexdigest()[:16]


def write_tokenizer(spec: str, directory: Path) -> None:
    """Write the files of the tokenizer that a config names, including its chat template."""
    if spec == "bytes":
        write_byte_tokenizer(directory)
        return
    file = _tokenizer_file(Path(spec))
    shutil.copyfile(file, directory / "tokenizer.json")
    for name in _COMPANION_FILES:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, directory / name)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ConfigError unless every id of the tokenizer has a row in the model's embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size ({vocab_size}) must be at least the tokenizer's "
            f"{tokenizer.vocab_size} ids. Try --set model.vocab_size={tokenizer.vocab_size}."
        )


def write_byte_tokenizer(directory: str | Path) -> Path:
    """Write ByteTokenizer as tokenizer.json (and its config), for engines that load such files.

    A byte-pair vocabulary without merges gives the same ids. Returns the path of tokenizer.json.
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
    """The printable character that represents each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(_BYTES) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(_BYTES + hidden.index(byte))
        for byte in range(_BYTES)
    ]


def _encode_utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # a lone surrogate becomes "?"


def _replace_invalid(text: str) -> str:
    return _encode_utf8(text).decode("utf-8")


def _find_special_id(name: str, ids: dict[str, int]) -> int:
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


def _mark_all_special(text: str, tokenizer: tokenizers.Tokenizer) -> str:
    """A copy of a tokenizer.json in which all added tokens are marked special.

    `encode_special_tokens` makes the tokenizer ignore only tokens marked special. A file may mark
    a token that ends a turn as not special, and rows are untrusted text that may contain it.
    """
    if all(token.special for token in tokenizer.get_added_tokens_decoder().values()):
        return text
    tokenizer_json = json.loads(text)
    for token in tokenizer_json["added_tokens"]:
        token["special"] = True
    return json.dumps(tokenizer_json)


def _find_end_of_text_id(file: Path, vocab: dict[str, int]) -> int:
    settings = file.parent / "tokenizer_config.json"
    names: list[str] = list(_END_OF_TEXT_NAMES)
    if settings.is_file():
        try:
            eos = parse_json_object(settings.read_bytes()).get("eos_token")
            eos = eos.get("content") if isinstance(eos, dict) else eos
            if not isinstance(eos, str | None):
                raise ValueError(f"eos_token is {eos!r:.60}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{settings} must be JSON whose eos_token, if any, is a string; {error}. Copy it "
                "again from the original tokenizer, or move it away."
            ) from error
        names[:0] = [] if eos is None else [eos]
    for name in names:
        if name in vocab:
            return vocab[name]
    raise ConfigError(
        f"the tokenizer must have a token that ends a turn; {file} has none of "
        f"{', '.join(('<|return|>', *_END_OF_TEXT_NAMES))}. Write eos_token into {settings}."
    )
