# SPDX-License-Identifier: Apache-2.0
"""A JSON schema as a TypeScript type, in the form in which GPT-OSS is shown its tools.

The text equals that of oss-harmony, including its formatting. What that form does not express
(`anyOf`, `$ref`, `const`, bounds) is `any`, or is left out.
Next: jaxmoe/data/harmony/tools.py puts the types into prompts.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def write_type(schema: Any, indent: str = "") -> str:
    """The type of a schema; its lines after the first begin with `indent`."""
    schema = schema if isinstance(schema, Mapping) else {}
    variants, kind = schema.get("oneOf"), schema.get("type")
    if isinstance(variants, list | tuple):
        return "".join(f"\n{indent} | {_write_variant(v, indent)}" for v in variants)
    if isinstance(kind, list | tuple):
        names = [_TYPES.get(name, name) for name in kind if isinstance(name, str)]
        return " | ".join(names) or "any"
    if kind == "object":
        return _write_object(schema, indent)
    if kind == "array":
        return f"{write_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        values = _list_of(schema, "enum")
        return " | ".join(f'"{value}"' for value in values if isinstance(value, str)) or "string"
    return _TYPES.get(kind, "any") if isinstance(kind, str) else "any"


def write_json(value: Any) -> str:
    """Compact JSON, with numbers as oss-harmony writes them."""
    if isinstance(value, Mapping):
        pairs = ",".join(f"{write_json(str(k))}:{write_json(v)}" for k, v in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(write_json, value))}]"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        value = float(value)
    if isinstance(value, float):
        digits, exponent, power = repr(value).partition("e")
        if not exponent:
            return digits
        if power == "-05":
            sign, digits = "-" * (digits[0] == "-"), digits.lstrip("-").replace(".", "")
            return f"{sign}0.0000{digits}"
        return f"{digits}e{power[0]}{power[1:].lstrip('0')}"
    return json.dumps(value, ensure_ascii=False)


def _write_object(schema: Mapping[str, Any], indent: str) -> str:
    properties, required = schema.get("properties"), _list_of(schema, "required")
    text = _write_comment(schema.get("description"), indent) + "{\n"
    for name, value in properties.items() if isinstance(properties, Mapping) else ():
        value = value if isinstance(value, Mapping) else {}
        label = f"{indent}{name}{'' if name in required else '?'}:"
        write = _write_union if isinstance(value.get("oneOf"), list | tuple) else _write_property
        text += _write_heading(value, indent) + write(label, value, indent)
    return f"{text}{indent}}}"


def _write_heading(schema: Mapping[str, Any], indent: str) -> str:
    title, examples = schema.get("title"), _list_of(schema, "examples")
    text = f"{indent}// {title}\n{indent}//\n" if isinstance(title, str) else ""
    if "oneOf" not in schema:
        text += _write_comment(schema.get("description"), indent)
    if examples:
        text += f"{indent}// Examples:\n"
        text += "".join(f'{indent}// - "{e}"\n' for e in examples if isinstance(e, str))
    return text


def _write_property(label: str, schema: Mapping[str, Any], indent: str) -> str:
    kind = _add_null(write_type(schema, f"{indent}    "), schema)
    default = "" if "oneOf" in schema else _write_default(schema)
    return f"{label} {kind},{f' // {default}' if default else ''}\n"


def _write_union(label: str, schema: Mapping[str, Any], indent: str) -> str:
    """A property with `oneOf`: each variant on a line of its own."""
    variants, description = schema["oneOf"], schema.get("description")
    first = variants[0].get("description") if variants and _is_map(variants[0]) else None
    is_above = isinstance(description, str) and description != first
    default = _write_default(schema)
    text = _write_comment(description, indent) if is_above else ""
    text += f"{indent}// {default}\n" if default else ""
    text += f"{label}\n"
    for i, variant in enumerate(variants):
        variant = variant if isinstance(variant, Mapping) else {}
        notes = [_write_default(variant)] if "default" in variant else []
        note = variant.get("description")
        if isinstance(note, str) and note != description and not (i == 0 and is_above):
            notes.insert(0, note)
        kind = _add_null(write_type(variant, f"{indent}   "), variant)
        text += f"{indent} | {kind}{_write_notes(notes)}\n"
    return f"{text}{indent},\n"


def _write_variant(schema: Any, indent: str) -> str:
    """A variant of a `oneOf` that is not a property's."""
    schema = schema if isinstance(schema, Mapping) else {}
    description = schema.get("description")
    notes = [description] if isinstance(description, str) else []
    if "default" in schema:
        is_enum = bool(_list_of(schema, "enum"))
        default = schema["default"]
        notes.append(
            f"default: {write_json(default)}" if is_enum else _write_default({"default": default})
        )
    kind = _add_null(write_type(schema, f"{indent}   "), schema)
    return f"{kind}{_write_notes(notes)}"


def _write_default(schema: Mapping[str, Any]) -> str:
    """The default of a schema as a comment; quotes and backslashes in texts are not escaped."""
    if "default" not in schema:
        return ""
    default = schema["default"]
    if not isinstance(default, str):
        return f"default: {write_json(default)}"
    return f"default: {default}" if _list_of(schema, "enum") else f'default: "{default}"'


def _write_comment(text: Any, indent: str) -> str:
    return f"{indent}// {text}\n" if isinstance(text, str) else ""


def _add_null(kind: str, schema: Mapping[str, Any]) -> str:
    return f"{kind} | null" if schema.get("nullable") is True and "null" not in kind else kind


def _list_of(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = schema.get(name)
    return value if isinstance(value, list | tuple) else []


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _write_notes(notes: list[str]) -> str:
    return f" // {' '.join(notes)}" if notes else ""
