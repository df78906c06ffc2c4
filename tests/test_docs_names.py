# SPDX-License-Identifier: Apache-2.0
"""Names in README, docs/ and docstrings: files and modules exist, figures have a command."""

import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.pages import DOCS, PAGES, ROOT, START, named

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CODE = [
    p
    for top in ("jaxmoe", "pallas_kernels", "configs", "tests")
    for p in sorted((ROOT / top).rglob("*.py"))
]

FIGURE = re.compile(r"\d\.\d|\d [GMK]i?B|×")


def test_the_pages_name_files_that_exist():
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(
            r"`((?:jaxmoe|pallas_kernels|configs|tests|launch)/[\w/.-]*)`", text
        ):
            assert (ROOT / name).exists(), (named(page), name)
        for name in re.findall(r"\]\((?!https?:)([^)#]+)|src=\"([^\"]+)\"", text):
            assert (page.parent / (name[0] or name[1])).exists(), (named(page), name)


def test_docstrings_name_files_that_exist():
    """`Next: path`, from the file's folder or from the root; and whole paths anywhere."""
    for path in CODE:
        begin = re.match(r'(?:#.*\n)*"""(.*?)"""', path.read_text(), re.S)
        doc = begin[1] if begin else ""
        _, _, after = doc.partition("Next: ")
        after = re.split(r"\n\n|Source: ", after)[0]
        for name in re.findall(r"[\w/]+\.(?:py|md)\b", after):
            assert (ROOT / name).exists() or (path.parent / name).exists(), (named(path), name)
        for name in re.findall(r"\b(?:jaxmoe|pallas_kernels|configs|tests)/[\w/]+\.py\b", doc):
            assert (ROOT / name).exists(), (named(path), name)


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]], str]]:
    """Header, rows, and what stands between the table and the heading above it."""
    for table in re.finditer(r"^\|.*\n\|[-|: ]+\|\n((?:\|.*\n)*)", text, re.M):
        above = re.split(r"^#+ .*$", text[: table.start()], flags=re.M)[-1]
        head, _, *rows = (
            [c.strip() for c in line[1:-1].split("|")] for line in table[0].splitlines()
        )
        yield head, rows, above


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=named)
def test_every_table_of_figures_names_its_command(page):
    for head, rows, above in tables(re.sub(r"\\\|", "", page.read_text())):
        if "measured" in head:
            column = head.index("command")
            assert all(START.match(row[column].partition("`")[2]) for row in rows), (page, head)
        elif sum(bool(FIGURE.search(re.sub("`.*?`", "", c))) for row in rows for c in row) > 3:
            assert re.search(r"`[^`]*\bpython [^`]+`", above), f"{named(page)}: {head}"


def test_the_figures_of_the_main_job_are_small():
    pictures = [p for p in (ROOT / "docs").rglob("*.png")]
    assert pictures and all(p.stat().st_size < 100_000 for p in pictures)


def test_the_api_pages_name_modules_that_exist():
    modules = [m for p in DOCS for m in re.findall(r"^::: ([\w.]+)$", p.read_text(), re.M)]
    assert len(modules) > 30
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


def test_the_layers_of_the_docs_are_the_contract():
    text = (ROOT / "docs/architecture.md").read_text()
    block = text.partition("<!-- layers -->\n```\n")[2].partition("\n```")[0]
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["id"] == "layers")
    assert block == "\n".join(layers).replace("jaxmoe.", "")
