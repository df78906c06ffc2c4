# SPDX-License-Identifier: Apache-2.0
"""docs/glossary.md has every metric that the product logs, and no other; each alert has advice."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from docs.make_tables import PAGES
from jaxmoe.observe.alerts import RULES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "glossary.md").read_text()
GROUPS = (
    "batch|contexts|critic|data|distill|env|episode_len|eval|gate|grad|hack|lost|optim|policy|quant"
    "|response_len|reward|rollout|rollout_corr|router|staleness|stop|time|tool|turns"
)
NAME = re.compile(rf"({GROUPS})/[a-z0-9_@]+")
# names that are put together from parts, by the parts
ASSEMBLED = (
    "rollout_corr/rollout_is_",
    "rollout_corr/ratio_p",
    "eval/pass@",
    "time/",
    "stop/",
    "reward/env/",
    "reward/turn/",
    "reward/score_by_judge/",
    "reward/score_instructions/",
    *(f"router/{x}" for x in ("trainer_", "engine_", "old_", "margin_p", "boundary_mass")),
    "router/entropy",
    "router/top_k_mass",
    "lost/CAUSE_frac",
)


@cache
def messages() -> list[str]:
    """Every text of the product, with … where something is filled in."""
    texts = list[str]()
    for path in (ROOT / "jaxmoe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def names_in_source() -> set[str]:
    """Literals of the product that have the form of a metric's name."""
    return {text for text in messages() if NAME.fullmatch(text)}


def names_in_page() -> set[str]:
    """Names in code quotes in the first column of the page's tables."""
    columns = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {name for column in columns for name in re.findall(r"`([a-z_]+/[^`]+)`", column)}


def test_every_metric_is_in_the_glossary():
    missing = {x for x in names_in_source() - names_in_page() if not x.startswith(ASSEMBLED)}
    assert not missing, f"docs/glossary.md must explain {sorted(missing)}"


def test_every_name_of_the_glossary_is_logged():
    stale = {x for x in names_in_page() - names_in_source() if not x.startswith(ASSEMBLED)}
    assert not stale, f"docs/glossary.md explains {sorted(stale)}, which nothing logs"


@pytest.mark.parametrize("name", PAGES)
def test_a_table_is_that_of_the_code(name):
    page = (ROOT / "docs" / name).read_text()
    assert page == PAGES[name](page), "Type python docs/make_tables.py"


def test_every_alert_is_in_the_troubleshooting_page():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    alerts = text.partition("## Alerts")[2].partition("\n## ")[0]
    missing = {rule.metric for rule in RULES if f"`{rule.metric}`" not in alerts}
    assert not missing, f"docs/troubleshooting.md must say what to do about {sorted(missing)}"


def test_messages_that_the_troubleshooting_page_quotes_are_messages():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = text.partition("## Before the first step")[2].splitlines()
    cells = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell) if " " in quote]
    assert len(quotes) > 5
    texts = messages()
    for quote in quotes:
        parts = [part.strip() for part in quote.split("…") if part.strip()]
        assert any(all(part in text for part in parts) for text in texts), quote
