# SPDX-License-Identifier: Apache-2.0
"""Count the words that make code hard to read: `python tests/words.py [PATH ...]`.

Prints one line for each name or docstring to change, then a table. Used by test_words.py.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("jaxmoe", "pallas_kernels")
MAX_TEST_WORDS = 8  # the name of a failing test is to be read at a glance

# Words that tell a story instead of naming a thing. `found` can be a file, a port or a gradient.
NARRATION = frozenset(
    "again alone along already always anew any apart around as ask asked asks at away back began "
    "behind beside besides best both by came come comes do does doing done each else ever every "
    "everyone everyones everything far for found from gave give given gives goes gone got had has "
    "have held her here hers how if in instead into it its just kept knew know known knows late "
    "later least left less look looked looks made many me mine more most must my near never new "
    "now odd of off often on once one ones onto other others our ours out over own quite rather "
    "rest right said same saw say says see seen she should shown so some somewhere still such take "
    "taken takes tell tells than that their theirs them then there these they thing things this "
    "those thus to together told took tried under until up us wanted wants was way ways we were "
    "what whatever when where whether which who whoever whole whom whose why within without wrong "
    "yet your yours".split()
)
# Words of that list which are a term here.
TERMS = {
    "new": "the counterpart of old in an update",
    "up": "the up projection of an expert",
    "out": "the output buffer or projection, beside o and dout",
}
# Openings that leave the reader to guess the subject.
OPENINGS = frozenset(
    "What Of Whether By Where Which Why How Who Whose When That Those These This Nothing Whatever "
    "Let As On In At From To With Without".split()
)


@dataclass
class Words:
    """Counts of one or more files, and the places to change."""

    lines: int = 0
    functions: int = 0
    documented: int = 0
    narration: list[str] = field(default_factory=list)
    narrating: list[str] = field(default_factory=list)  # functions among them
    long_tests: list[str] = field(default_factory=list)
    one_word: list[str] = field(default_factory=list)
    openings: list[str] = field(default_factory=list)
    modules: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def duplicates(self) -> dict[str, list[str]]:
        """Modules of each public function name that more than one module defines."""
        several = {name: sorted(files) for name, files in self.modules.items() if len(files) > 1}
        return dict(sorted(several.items()))


def strip_shape(name: str) -> str:
    """The name without leading underscores and its shape suffix: `found_BT` -> `found`."""
    return re.sub(r"_[A-Z]+\d*$", "", name).strip("_")


def bound_names(node: ast.AST) -> Iterator[str]:
    """Names that this node binds, of variables, arguments, attributes and functions."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name


def count_file(path: Path, words: Words) -> None:
    """Add the counts of one file to `words`."""
    text = path.read_text()
    tree = ast.parse(text)
    place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    words.lines += len(text.splitlines())
    for node in ast.walk(tree):
        for name in bound_names(node):
            word = strip_shape(name).lower()
            if word in NARRATION and word not in TERMS:
                words.narration.append(f"{place}:{getattr(node, 'lineno', 0)} {name}")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        word = strip_shape(node.name).lower()
        if word in NARRATION and word not in TERMS:
            words.narrating.append(f"{place}:{node.lineno} {node.name}")
        if node.name.startswith("test_") and node.name.count("_") > MAX_TEST_WORDS:
            words.long_tests.append(f"{place}:{node.lineno} {node.name}")
        if node.name.startswith("__"):
            continue
        words.functions += 1
        if "_" not in strip_shape(node.name):
            words.one_word.append(f"{place}:{node.lineno} {node.name}")
        docstring = ast.get_docstring(node)
        if docstring:
            words.documented += 1
            if docstring.split()[0].strip(",.:;`") in OPENINGS:
                words.openings.append(f"{place}:{node.lineno} {docstring.splitlines()[0]}")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                words.modules[node.name].add(str(place))


def count_words(paths: Iterable[Path]) -> Words:
    """Counts over the Python files of these files and folders."""
    words = Words()
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            count_file(file, words)
    return words


def print_words(words: Words) -> None:
    for title in ("narration", "long_tests", "one_word", "openings"):
        for line in getattr(words, title):
            print(f"{title:10} {line}")
    for name, files in words.duplicates.items():
        print(f"duplicate  {name}: {', '.join(files)}")
    functions, documented = max(words.functions, 1), max(words.documented, 1)
    print(
        f"lines {words.lines:,}; narration {len(words.narration)} "
        f"({1000 * len(words.narration) / max(words.lines, 1):.1f} per 1,000 lines); long names of "
        f"tests {len(words.long_tests)}; one-word function names "
        f"{len(words.one_word) / functions:.0%} of {words.functions}; docstring openings "
        f"{len(words.openings) / documented:.1%} of {words.documented}; public function names in "
        f"several modules {len(words.duplicates)}"
    )


if __name__ == "__main__":
    print_words(
        count_words([Path(x).resolve() for x in sys.argv[1:]] or [ROOT / x for x in PRODUCT])
    )
