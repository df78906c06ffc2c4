# SPDX-License-Identifier: Apache-2.0
"""The pages that the tests of the docs read, and how a command in them begins."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "launch/README.md",
    ROOT / "benchmarks/README.md",
    *DOCS,
]
# what others ship: nothing here can say whether it is typed right
FOREIGN = ("ruff", "pyright", "lint-imports", "bazel", "npx", "uv", "mkdocs")
START = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:[\w./-]*/bin/)?(?:python3?|pip|launch/(?:local|vllm_server)\.sh|"
    + "|".join(FOREIGN)
    + r") "
)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
