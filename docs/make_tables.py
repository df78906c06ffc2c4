# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/ that are made from the code: `python docs/make_tables.py`."""

import dataclasses
from pathlib import Path

from jaxmoe.config import Config
from jaxmoe.config.settings import Setting, iter_settings, may_be_none

DOCS = Path(__file__).parent


def settings_table() -> str:
    """Rows of all settings: key, default, values, meaning, and whether a resume may change it."""
    rows = ["| setting | default | values | | resume |", "|---|---|---|---|---|"]
    for key, field, fact in iter_settings(Config):
        cells = [f"`{key}`", format_default(field), format_values(field, fact)]
        resume = f"yes, {fact.resume}" if isinstance(fact.resume, str) else "yes" * fact.resume
        cells += [fact.meaning.replace("|", "\\|").replace("*", "\\*"), resume]
        rows.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(rows)


def format_default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "`{}`"
    if field.default in (dataclasses.MISSING, ""):
        return ""
    return f"`{field.default}`".replace(",", ", ")


def format_values(field: dataclasses.Field, fact: Setting) -> str:
    if fact.rule is None:
        return "True or False" if field.type is bool else ""
    or_none = " (None is off)" if may_be_none(field) else ""
    return fact.rule.text.removeprefix("one of ") + or_none


TABLES = {"configuration.md": settings_table}


def make_page(name: str) -> str:
    """Return the text of a page with its table made again."""
    text = (DOCS / name).read_text()
    begin, end = "<!-- made by docs/make_tables.py -->\n", "\n<!-- end -->"
    assert text.count(begin) == text.count(end) == 1, name
    head, _, rest = text.partition(begin)
    return head + begin + TABLES[name]() + end + rest.partition(end)[2]


if __name__ == "__main__":
    for name in TABLES:
        (DOCS / name).write_text(make_page(name))
