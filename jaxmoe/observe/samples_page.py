# SPDX-License-Identifier: Apache-2.0
"""What policies write, made safe to look at: for a terminal, and as a page for a browser.

Answers and rows are anybody's text. What could steer a terminal or turn the reading direction is
spelled out, what could be markup is escaped, and the page forbids itself scripts and the network.
Next: jaxmoe/samples.py is the command.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxmoe.observe.sample_rows import checked_row
from jaxmoe.run_files import replace_text

STEPS = 24  # on a page of all: the first, the last, and others between them
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")

Rows = Sequence[Mapping[str, Any]]


def spelled(text: str, keep: str = "") -> str:
    """A text with every character that cannot be seen written as its escape: ESC as \\x1b."""
    return "".join(
        c if c in keep or unicodedata.category(c) not in _UNSEEN else _escape(c) for c in text
    )


def _escape(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")


def by_step(rows: Rows) -> dict[int, list[Mapping[str, Any]]]:
    """Samples of each step, in order, with values of the types that are shown."""
    checked = (checked_row(row) for row in rows if row.get("stage") == "rl")
    rows = sorted(checked, key=lambda row: row["step"])
    return {step: list(group) for step, group in groupby(rows, key=lambda r: r["step"])}


def as_text(step: int, rows: Rows, width: int = 100) -> str:
    """A step's samples, a line each."""
    out = [f"rl step {step}"]
    for row in rows:
        out.append(f"\n  {_short(row.get('prompt'), width)}")
        if row.get("answer") is not None:
            out.append(f"  stored answer: {_short(row['answer'], width)}")
        for one in row.get("samples") or [row]:
            told = f"    reward {_figure(one.get('reward'))}"
            if "samples" in row:
                told += (f"  advantage {_figure(one.get('advantage'), '+.2f')}"
                         f"  gap {_figure(one.get('gap_mean'), '.1e')}"
                         f" (max {_figure(one.get('gap_max'), '.1e')})")  # fmt: skip
            cut = "  cut off" if one.get("stop") == "max_tokens" else ""
            out.append(f"{told}{cut}  {_short(one.get('response'), width)}")
    return "\n".join(out)


def _short(text: Any, width: int) -> str:
    said = spelled(str(text))
    return said if len(said) <= width else f"{said[:width]}… ({len(said):,} characters)"


def _figure(value: Any, form: str = ".3g") -> str:
    return "none" if not isinstance(value, int | float) else format(value, form)


def write_page(rows: Rows, title: str, path: Path) -> None:
    """One file with all there is to see: no script, nothing fetched.

    Raises RunFolderError where the disk does not take it, or `path` is a link.
    """
    steps = by_step(rows)
    numbers = list(steps)
    if len(numbers) > STEPS:
        last = len(numbers) - 1
        numbers = [numbers[round(i * last / (STEPS - 1))] for i in range(STEPS)]
    parts = [
        f"<details{' open' if n in (numbers[0], numbers[-1]) else ''}><summary>rl step {n}"
        f"</summary>{''.join(map(_row, steps[n]))}</details>"
        for n in dict.fromkeys(numbers)
    ]
    shown = f"{len(parts)} of {len(steps)} steps" + (
        "; --step N shows another" if len(parts) < len(steps) else ""
    )
    page = _PAGE.format(title=_html(title), shown=escape(shown), body="".join(parts))
    replace_text(path, page)


def _html(text: Any) -> str:
    """Text as text; what cannot be seen is spelled out and marked."""
    return "".join(
        escape(c) if c in "\n\t" or unicodedata.category(c) not in _UNSEEN
        else f"<i>{escape(_escape(c))}</i>"
        for c in str(text)
    )  # fmt: skip


def _row(row: Mapping[str, Any]) -> str:
    kind = "trained on" if row.get("kind") == "group" else "held out"
    answer = row.get("answer")
    stored = "" if answer is None else f"<p class=s>stored answer <q>{_html(answer)}</q></p>"
    head = f"<h2>{kind}, row {_html(row.get('row', '?'))}</h2><pre>{_html(row.get('prompt'))}</pre>"
    if row.get("kind") != "group":
        body = (f"<p class=n>greedy · reward {_figure(row.get('reward'))}{_cut(row)}</p>"
                f"<pre class=a>{_html(row.get('response'))}</pre>")  # fmt: skip
    else:
        body = "".join(map(_sample, row.get("samples") or []))
    return f"<section>{head}{stored}{body}</section>"


def _sample(one: Mapping[str, Any]) -> str:
    told = (
        f"reward {_figure(one.get('reward'))} · advantage {_figure(one.get('advantage'), '+.3f')}"
        f" · {_figure(one.get('length'))} tokens"
        f" · |Δlogp| mean {_figure(one.get('gap_mean'), '.1e')},"
        f" max {_figure(one.get('gap_max'), '.1e')} nats{_cut(one)}"
    )
    tokens = one.get("tokens") or []
    spans = "".join(_token(*piece) for piece in tokens if len(piece) == 3)
    total = one.get("length")
    more = isinstance(total, int) and total > len(tokens) and len(tokens) >= 100
    whole = f"<pre>{_html(one.get('response'))}</pre>"
    rest = f"<details><summary>whole answer</summary>{whole}</details>"
    return f"<p class=n>{told}</p><pre class=a>{spans}</pre>{rest if more or not tokens else ''}"


def _cut(one: Mapping[str, Any]) -> str:
    return " · <b>cut off</b>" if one.get("stop") == "max_tokens" else ""


def _token(text: Any, gap: Any, prob: Any) -> str:
    """One token, redder the further trainer and engine are apart: full at 1 nat, none at 1e-6."""
    said = f"Δlogp {_figure(gap, '+.1e')} nats, p {_figure(prob, '.2g')}"
    level = 0
    if isinstance(gap, int | float):
        level = sum(abs(gap) > bound for bound in (1e-5, 1e-3, 1e-2, 1e-1, 1.0))
    return f'<span class=g{level} title="{escape(said)}">{_html(text)}</span>'


_PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<meta name=viewport content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff; overflow-wrap: anywhere }}
summary {{ font-weight: 600; cursor: pointer; padding: .4em 0 }}
section {{ border-top: 1px solid #ddd; padding: .5em 0 1em }}
h2 {{ font-size: 1em; color: #555; margin: .3em 0 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; direction: ltr;
  min-height: 1.5em; max-height: 22em; overflow: auto; margin: .2em 0;
  padding: .4em .6em; background: #f6f6f6;
  font: 13px/1.5 ui-monospace, monospace }}
pre.a {{ background: #eef4fb }}
p {{ margin: .4em 0 }} .s {{ max-height: 8em; overflow: auto }}
.n {{ color: #555; font-size: .9em }}
q {{ unicode-bidi: isolate; white-space: pre-wrap }}
i {{ color: #a0307a; font-style: normal; font-size: .85em }}
span {{ unicode-bidi: isolate; border-right: 1px solid #c5d5e5 }}
.g1 {{ background: #fdf1d8 }} .g2 {{ background: #fbdfa6 }} .g3 {{ background: #f7b96b }}
.g4 {{ background: #ef8a4f }} .g5 {{ background: #d7301f; color: #fff }}
</style></head><body><h1>{title}</h1>
<p class=n>{shown}. Tokens by |Δlogp| between trainer and engine, above
<span class=g1>1e-5</span> <span class=g2>1e-3</span> <span class=g3>0.01</span>
<span class=g4>0.1</span> <span class=g5>1</span> nats; a mark spells what cannot be seen:
<i>\\x1b</i>.</p>
{body}</body></html>
"""
