# SPDX-License-Identifier: Apache-2.0
"""Blocks of code in a response: each language, other blocks around them, and hostile texts."""

import time

import pytest

from jaxmoe.graders.code_blocks import list_code_blocks
from jaxmoe.graders.code_scorer import extract_code

CODE = "def f(x):\n    return 1"


@pytest.mark.parametrize("opening", ["```", "```python", "```Python", "```python3.11", "~~~py"])
def test_a_block_may_name_any_language(opening):
    assert extract_code(f"So:\n{opening}\n{CODE}\n{opening[:3]}\nDone.", "f") == CODE


@pytest.mark.parametrize(
    "text",
    [
        "```text\nexample\n```\nThen\n```python\n{}\n```",
        "```bash\npip install x\n```\n```python\n{}\n```",
        "```python\n{}\n```\nprints\n```text\n1\n```",
        "```python\n{}\n```\n```\n2\n```",
        "```python\n{}\n```\n```python\nprint(f(1))\n```",
        "The code is ```python\n{}\n``` and `f(1)` is 1.",
        "Use ```f``` as here:\n```python\n{}\n```",
        "````markdown\n```\ninner\n```\n````\n```python\n{}\n```",
        "```python\n{}",  # cut off
        "```python\nx = 1\n```python\n{}\n```",
    ],
)
def test_other_blocks_hide_no_code(text):
    assert extract_code(text.format(CODE), "f") == CODE


def test_the_last_definition_counts():
    other = CODE.replace("1", "2")
    assert extract_code(f"```\n{CODE}\n```\nBetter:\n```\n{other}\n```", "f") == other


def test_a_block_in_a_list_is_dedented():
    indented = CODE.replace("\n", "\n   ")
    assert extract_code(f"1. So:\n   ```python\n   {indented}\n   ```\n", "f") == CODE
    # a body that continues the prompt keeps its indentation
    body = "    return 1"
    assert extract_code(f"```python\n{body}\n```\n", "f", "def f(x):\n").endswith(body)


def test_annotated_and_paired_names_are_definitions():
    assert extract_code("f: object = abs", "f") and extract_code("f, g = abs, len", "f")
    assert extract_code("f: object", "f") is None and extract_code("f[0] = 1", "f") is None


def test_hostile_texts_take_linear_time():
    start = time.process_time()
    for text in ("```" + " " * 30_000 + "x", "```\n" * 20_000, "`" * 60_000, "~~~a```b\n" * 5_000):
        assert extract_code(text, "f") is None
    assert time.process_time() - start < 2
    assert list_code_blocks("no block, `f` and ```f```") == []
