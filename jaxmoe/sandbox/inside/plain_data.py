# SPDX-License-Identifier: Apache-2.0
"""Python values as JSON: numbers, texts and containers of them, exactly, and nothing else.

Values cross the border of a sandbox only in this form, so an object with an `__eq__` of its own
never reaches the side that compares.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 50


class NotPlainData(ValueError):
    """The value has no plain form; the message names its type."""


class NestedTooDeep(NotPlainData):
    """The value has no plain form because of its depth, and not because of a type."""


@dataclass(frozen=True)
class PlainForm:
    """A value in its JSON form, which the trainer passes on and does not decode.

    A program chooses the hashes of its numbers: a set of many equal ones takes hours to make.
    """

    form: Any

    def decode(self) -> Any:
        """The value."""
        return decode_value(self.form)


def encode_value(value: Any, depth: int = 0) -> Any:
    """The JSON form of a value. Raises NotPlainData."""
    if isinstance(value, PlainForm):
        return value.form
    if depth > MAX_DEPTH:
        raise NestedTooDeep(f"nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value if value is None else bool(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return {"float": float.__repr__(float(value))}
    if isinstance(value, complex):
        parts = complex(value)
        return {"complex": [float.__repr__(parts.real), float.__repr__(parts.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode_value(x, depth + 1) for x in pair] for pair in pairs]}
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            items = kind.__iter__(value)  # not that of a subclass
            return {kind.__name__: [encode_value(item, depth + 1) for item in items]}
    raise NotPlainData(f"a value of type {type(value).__name__}")


def decode_value(form: Any, depth: int = 0) -> Any:
    """The value of a JSON form. Raises NotPlainData for any other JSON."""
    if depth > MAX_DEPTH:
        raise NotPlainData(f"nested more than {MAX_DEPTH} deep")
    if form is None or isinstance(form, bool | str):
        return form
    if isinstance(form, Mapping) and len(form) == 1:
        ((kind, content),) = form.items()
        try:
            return _decode_tagged(kind, content, depth + 1)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise NotPlainData(f"a malformed {kind}") from error
    raise NotPlainData(f"JSON of type {type(form).__name__}")


def check_form(form: Any) -> PlainForm:
    """The form of a value that can be decoded; it hashes nothing. Raises NotPlainData."""
    _check_form(form, 0, is_hashed=False)
    return PlainForm(form)


def _check_form(form: Any, depth: int, *, is_hashed: bool) -> None:
    """is_hashed: True for members of sets and for keys, which no list, set or dict can be."""
    if not isinstance(form, Mapping) or len(form) != 1 or depth > MAX_DEPTH:
        decode_value(form, depth)
        return
    ((kind, content),) = form.items()
    if kind not in ("dict", *_CONTAINERS):
        decode_value(form, depth)
        return
    if not isinstance(content, list) or (is_hashed and kind in ("list", "set", "dict")):
        raise NotPlainData(f"a malformed {kind}")
    if kind != "dict":
        are_hashed = kind in ("set", "frozenset") or is_hashed
        for item in content:
            _check_form(item, depth + 1, is_hashed=are_hashed)
        return
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise NotPlainData("a malformed dict")
        _check_form(pair[0], depth + 1, is_hashed=True)
        _check_form(pair[1], depth + 1, is_hashed=False)


def _decode_tagged(kind: str, content: Any, depth: int) -> Any:
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        real, imaginary = content
        return complex(float(real), float(imaginary))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode_value(k, depth): decode_value(v, depth) for k, v in content}
    make: Callable[[list[Any]], Any] = _CONTAINERS[kind]
    if not isinstance(content, list):
        raise TypeError("not a list")
    return make([decode_value(item, depth) for item in content])


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
