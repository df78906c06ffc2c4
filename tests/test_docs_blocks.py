# SPDX-License-Identifier: Apache-2.0
"""Every block of code in the pages runs in a test, or stands here with the reason why it does not.

Next: tests/test_docs.py, which runs the commands and the Python.
"""

import re

import pytest

from jaxmoe.checkpoint.same_run import CHANGEABLE_KEYS
from jaxmoe.config import describe_engine
from jaxmoe.config_file import load_config
from tests.pages import DOCS, PAGES, ROOT, START, named

# by how the block begins: what it is, and why it is not run
NOT_RUN = {
    "flowchart TD": "a picture",
    "studies\nstudy\n__main__ | train | eval | doctor": "the layers, compared with the contract",
    "python -m jaxmoe.train --config tiny.py --set optim.lr=1e-4\n 1  ": "a trace that "
    "tests/jaxmoe/test_whole_run.py prints; its command is run",
    "384 sampled tokens of 64 answers": "what the doctor prints",
    "rl      218/300  reward": "what a run prints",
    "    reward 1  2 turns": "what jaxmoe.samples prints",
    "kernels  sink_attention mosaic_gpu": "what a run prints on a GPU",
    '{"prompt": "3+4=", "answer": 7': "rows, which the command below them reads",
    '{"prompt": "Say hello. Use no commas."': "a row, as in tests/jaxmoe/graders/instructions",
    "def correct(completions, answer, unit": "rewards, run by tests/jaxmoe/test_train_rewards.py",
    "calls = []": "run by tests/jaxmoe/rl/test_extending.py, with the names it takes for granted",
    "def replaying(": "run by tests/jaxmoe/rl/test_extending.py, likewise",
}
# lines of a block of commands that are none, or not ours to run
SHELL = re.compile(r"export \w+=|#|\s|\.venv/bin/(?:ruff|pip|python|mkdocs) |$")


def blocks(path):
    """Language and text of each fenced block, and of each run of indented lines (no language)."""
    text = path.read_text()
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    for block in re.findall(r"(?:^ {4}\S.*\n)+", prose, re.M):
        yield "", re.sub(r"^ {4}", "", block, flags=re.M)


def is_run(path, language, text):
    if language == "python":
        return path in (*DOCS, ROOT / "README.md")  # each is executed by tests/test_docs.py
    lines = re.sub(r"\\\n", "", text).splitlines()
    return any(START.match(x) for x in lines) and all(
        START.match(x) or SHELL.match(x) for x in lines
    )


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_block_is_tested_or_has_a_reason(path):
    for language, text in blocks(path):
        if not any(text.startswith(begin) for begin in NOT_RUN):
            assert is_run(path, language, text), f"{named(path)}: no test runs this block:\n{text}"


def test_each_reason_is_of_an_existing_block():
    texts = [text for path in PAGES for _, text in blocks(path)]
    for begin in NOT_RUN:
        assert any(text.startswith(begin) for text in texts), begin


def test_blocks_that_nothing_runs_are_found(tmp_path):
    for text, expected in (
        ("```\npython -m jaxmoe.train --config tiny.py\n```\n", True),
        ("    XLA_FLAGS= python -m pytest -q\n", True),
        ("```\nwidget --frobnicate\n```\n", False),
        ("    params = init_params(key, cfg)\n", False),
        ("```toml\n[a]\n```\n", False),
    ):
        page = tmp_path / "page.md"
        page.write_text(text)
        assert [is_run(page, *block) for block in blocks(page)] == [expected], text


def test_commands_about_equal_bits_compile_as_users_do():
    """tests/conftest.py has XLA compile quickly: other programs than those the page speaks of.

    Kernels that are interpreted are neither.
    """
    pages = ("docs/invariance.md", "docs/results/invariance.md")
    text = "".join((ROOT / page).read_text() for page in pages)
    commands = re.findall(r"`([^`\n]*python -m pytest[^`\n]*)`", text)
    assert len(commands) > 5
    for command in commands:
        free = re.search(r"-m (aot|gpu|tpu)\b|tests/pallas_kernels/", command)
        assert command.startswith("XLA_FLAGS= ") or free, command


def test_the_list_of_resumable_changes_is_complete():
    text = (ROOT / "docs/first_run.md").read_text()
    listed = text.partition("<!-- resume -->")[2].partition("<!-- /resume -->")[0]
    keys = {name.removesuffix("*") for name in re.findall(r"`([^`]+)`", listed)}
    files = {"data.task", "data.options.held_out", "init.tokenizer", "init.checkpoint"}
    engines = describe_engine(load_config("tiny_vllm.py")).changeable_options
    assert keys == {*CHANGEABLE_KEYS, *engines, *files}
