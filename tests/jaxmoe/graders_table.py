# SPDX-License-Identifier: Apache-2.0
"""The rows of the tables in docs/results/graders.md: stored answer, response, and both scores."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "results" / "graders.md"
_ROW = re.compile(r"\| `(.+?)` \| `(.+?)` \| ([01]) \| ([01]) \| .+ \|")

ROWS = [
    (stored, response, float(by_text), float(by_math))
    for stored, response, by_text, by_math in _ROW.findall(_PAGE.read_text(encoding="utf-8"))
]
