# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/ that are made from the code: `python docs/make_tables.py`."""

import dataclasses
import re
from pathlib import Path

from jaxmoe.config import Config
from jaxmoe.config.settings import Setting, iter_settings, may_be_none
from jaxmoe.observe.alerts import RULES

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


def make_configuration(text: str) -> str:
    """Return the page with its table of settings made again."""
    begin, end = "<!-- made by docs/make_tables.py -->\n", "\n<!-- end -->"
    head, _, rest = text.partition(begin)
    return head + begin + settings_table() + end + rest.partition(end)[2]


def make_glossary(text: str) -> str:
    """Return the page with the bounds of the alerts in the last column of its rows."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("| `"):
            names, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:3])
            metrics = re.findall("`([^`]+)`", names)
            bounds = dict.fromkeys(f"`{rule.bound}`" for rule in RULES if rule.metric in metrics)
            lines[i] = f"| {names} | {meaning} | {'; '.join(bounds)} |".replace("  ", " ")
    return "\n".join(lines) + "\n"


PAGES = {"configuration.md": make_configuration, "glossary.md": make_glossary}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make((DOCS / name).read_text()))
