# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as types, line by line."""

import pytest

from jaxmoe.data.json_schema_types import write_json, write_type


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "number"),
        ({"type": ["integer", "null"]}, "number | null"),
        ({"type": "string", "enum": ["a", "b"]}, '"a" | "b"'),
        ({"type": "string", "enum": []}, "string"),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "boolean"}}, "boolean[]"),
        ({"anyOf": [{"type": "string"}]}, "any"),
        ({}, "any"),
        ({"type": []}, "any"),
        ({"type": "null"}, "any"),
        (True, "any"),
        (
            {"oneOf": [{"type": "string", "default": "x"}, {"type": "number", "nullable": True}]},
            '\n | string // default: "x"\n | number | null',
        ),
        ({"type": "object"}, "{\n}"),
    ],
)
def test_a_type(schema, text):
    assert write_type(schema) == text


def test_properties_have_comments_defaults_and_question_marks():
    nested = {"type": "object", "description": "A place.", "properties": {"x": {"type": "number"}}}
    union = {
        "oneOf": [
            {"type": "string"},
            {"type": "number", "description": "In degrees.", "default": 1},
        ],
        "description": "A size.",
        "default": "s",
    }
    properties = {
        "unit": {
            "type": "string",
            "enum": ["c", "f"],
            "default": "c",
            "title": "Unit",
            "examples": ["c"],
        },
        "at": nested,
        "size": union,
        "note": {"type": "string", "default": "", "nullable": True},
    }
    text = write_type({"type": "object", "properties": properties, "required": ["at"]})
    assert text == (
        '{\n// Unit\n//\n// Examples:\n// - "c"\nunit?: "c" | "f", // default: c\n'
        "// A place.\nat:     // A place.\n{\n    x?: number,\n    },\n"
        '// A size.\n// default: "s"\nsize?:\n | string\n | number // In degrees. default: 1\n,\n'
        'note?: string | null, // default: ""\n}'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1.0, None, True]}, '{"a":[1.0,null,true]}'),
        (1e-5, "0.00001"),
        (1e-6, "1e-6"),
        (-1.5e-5, "-0.000015"),
        (1e16, "1e+16"),
        (2**64, "1.8446744073709552e+19"),
        ("é\n", '"é\\n"'),
    ],
)
def test_json_is_compact(value, text):
    assert write_json(value) == text
