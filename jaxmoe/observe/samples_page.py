# SPDX-License-Identifier: Apache-2.0
"""Show samples safely: as text for a terminal, and as an HTML page.

Answers and rows are untrusted text. Control characters and changes of the writing direction are
written as escapes, markup is escaped, and the page disables scripts and network access.
Next: jaxmoe/samples.py is the command.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxmoe.observe.sample_rows import check_row_types
from jaxmoe.run_files import replace_text

MAX_STEPS = 24  # on a page of all steps: first, last, and evenly spaced ones
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")

Rows = Sequence[Mapping[str, Any]]


def escape_invisible(text: str) -> str:
    """A text in which every invisible character is written as its escape: ESC as \\x1b."""
    return "".join(
        c if unicodedata.category(c) not in _INVISIBLE else _escape_char(c) for c in text
    )


def _escape_char(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")


def group_by_step(rows: Rows) -> dict[int, list[Mapping[str, Any]]]:
    """RL samples by step, in order, with checked types."""
    checked = (check_row_types(row) for row in rows if row.get("stage") == "rl")
    rows = sorted(checked, key=lambda row: row["step"])
    return {step: list(group) for step, group in groupby(rows, key=lambda r: r["step"])}


def format_samples(step: int, rows: Rows, width: int = 100) -> str:
    """A step's samples as text, one line each; in harmony format, one line for each message."""
    lines = [f"rl step {step}"]
    for row in rows:
        # The question is at the end, behind a system prompt.
        lines.append(f"\n  {_cut_middle(row.get('prompt'), 2 * width)}")
        if row.get("answer") is not None:
            lines.append(f"  stored answer: {_shorten(row['answer'], width)}")
        for sample in row.get("samples") or [row]:
            line = f"    reward {_format_reward(sample)}"
            if "samples" in row:
                line += (
                    f"  advantage {_format_number(sample.get('advantage'), '+.2f')}"
                    f"  gap {_format_number(sample.get('gap_mean'), '.1e')}"
                    f" (max {_format_number(sample.get('gap_max'), '.1e')})"
                )
            note = f"  {note}" if (note := _stop_note(sample)) else ""
            transcript = sample.get("transcript")
            if not transcript:
                lines.append(f"{line}{note}  {_cut_middle(sample.get('response'), width)}")
                continue
            lines.append(f"{line}{_format_turns(sample, '  ')}{note}")
            speakers = [_name_speaker(*entry[:2]) for entry in transcript]
            indent = max(map(len, speakers))
            lines += [
                f"      {speaker:<{indent}}  {_cut_middle(text, width)}"
                for speaker, (_, _, text) in zip(speakers, transcript, strict=True)
            ]
    return "\n".join(lines)


def _format_turns(sample: Mapping[str, Any], separator: str) -> str:
    """Number of turns and of the environment's tokens; nothing for an answer of one turn."""
    if not sample.get("env_length"):
        return ""
    turns, tokens = (_format_number(sample.get(name)) for name in ("turns", "env_length"))
    return f"{separator}{turns} turns, {tokens} tokens of the environment"


def _name_speaker(writer: str, speaker: Any) -> str:
    """The label of a message; of a raw text, who wrote its tokens."""
    return _shorten(speaker, 40) if speaker else f"({writer})"


def _stop_note(sample: Mapping[str, Any]) -> str:
    """The reason why an answer ended other than by a stop token, or nothing."""
    stop = sample.get("stop")
    if not stop or stop == "stop_token":
        return ""
    note = "truncated" if stop == "max_tokens" else _shorten(stop, 40).replace("_", " ")
    fault = sample.get("fault")
    return f"{note}: {_shorten(fault, 200)}" if fault else note


def _shorten(text: Any, width: int) -> str:
    escaped = escape_invisible(str(text))
    return escaped if len(escaped) <= width else f"{escaped[:width]}… ({len(escaped):,} characters)"


def _cut_middle(text: Any, width: int) -> str:
    """The start and the end of a text, in one line; a note for a text that shows nothing."""
    escaped = escape_invisible(str(text))
    if len(escaped) > width:
        start = width // 4
        escaped = (
            f"{escaped[:start]} […{len(escaped) - width:,} characters…] {escaped[start - width :]}"
        )
    return _note_blank(text) or escaped


def _note_blank(text: Any) -> str:
    """A note for a text that cannot be seen; nothing for others."""
    return "" if str(text).strip() else "(white space)" if str(text) else "(empty)"


def _format_number(value: Any, form: str = ".3g") -> str:
    return "none" if not isinstance(value, int | float) else format(value, form)


def write_page(rows: Rows, title: str, path: Path) -> None:
    """Write all samples as one HTML file without scripts or external resources, newest first.

    Raises: RunFolderError if it cannot be written, or if `path` is a link.
    """
    steps = group_by_step(rows)
    numbers = list(steps)
    if len(numbers) > MAX_STEPS:
        last = len(numbers) - 1
        numbers = [numbers[round(i * last / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]
    parts = [
        f"<details{' open' if n == numbers[-1] else ''}><summary>rl step {n}"
        f"</summary>{''.join(map(_row_html, steps[n]))}</details>"
        for n in dict.fromkeys(reversed(numbers))
    ]
    step_note = f"{len(parts)} of {len(steps)} steps" + (
        "; --step N shows another" if len(parts) < len(steps) else ""
    )
    page = _PAGE.format(title=_to_html(title), shown=escape(step_note), body="".join(parts))
    replace_text(path, page)


def _to_html(text: Any) -> str:
    """Escaped HTML of a text; invisible characters are written as marked escapes."""
    return "".join(
        escape(c)
        if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE
        else f"<i>{escape(_escape_char(c))}</i>"
        for c in str(text)
    )


def _to_visible_html(text: Any) -> str:
    """HTML of a text, with a note for one that would be a blank box."""
    note = _note_blank(text)
    return f"{_to_html(text)}<em>{note}</em>" if note else _to_html(text)


def _row_html(row: Mapping[str, Any]) -> str:
    kind = "training" if row.get("kind") == "group" else "held-out"
    answer = row.get("answer")
    stored = "" if answer is None else f"<p class=s>stored answer <q>{_to_html(answer)}</q></p>"
    head = (
        f"<h2>{kind}, row {_to_html(row.get('row', '?'))}</h2>"
        f"<pre>{_to_visible_html(row.get('prompt'))}</pre>"
    )
    if row.get("kind") != "group":
        body = (
            f"<p class=n>greedy · reward {_format_reward(row)}"
            f"{_note_html(row)}</p>"
            f"{_transcript_html(row) or _answer_html(row)}"
        )
    else:
        body = "".join(map(_sample_html, row.get("samples") or []))
    return f"<section>{head}{stored}{body}</section>"


def _format_reward(sample: Mapping[str, Any]) -> str:
    """The reward of an answer, and those of its turns if they have several."""
    return f"{_format_number(sample.get('reward'))}{_format_by_turn(sample.get('turn_rewards'))}"


def _format_by_turn(values: Any, form: str = "") -> str:
    """Numbers of turns in parentheses; "" for None."""
    return f" ({', '.join(_format_number(x, form) for x in values)} by turn)" if values else ""


def _sample_html(sample: Mapping[str, Any]) -> str:
    summary = (
        f"reward {_format_reward(sample)}"
        f" · advantage {_format_number(sample.get('advantage'), '+.3f')}"
        f"{_format_by_turn(sample.get('turn_advantages'), '+.3f')}"
        f" · {_format_number(sample.get('length'))} tokens"
        f" · |Δlogp| mean {_format_number(sample.get('gap_mean'), '.1e')},"
        f" max {_format_number(sample.get('gap_max'), '.1e')} nats{_note_html(sample)}"
    )
    tokens = sample.get("tokens") or []
    spans = "".join(
        _token_html(*entry) if len(entry) == 3 else f"<span class=e>{_to_html(entry[0])}</span>"
        for entry in tokens
    )
    tokens_html = f"<pre class=a>{spans}</pre>" if tokens else _answer_html(sample)
    if transcript := _transcript_html(sample):
        summarised = f"<details><summary>tokens with |Δlogp|</summary>{tokens_html}</details>"
        return f"<p class=n>{summary}</p>{transcript}{summarised if tokens else ''}"
    total = sample.get("length")
    has_more = isinstance(total, int) and total > len(tokens) and len(tokens) >= 100
    details = (
        f"<details><summary>complete answer</summary><pre>{_to_html(sample.get('response'))}</pre>"
        "</details>"
        if has_more
        else ""
    )
    return f"<p class=n>{summary}</p>{tokens_html}{details}"


def _answer_html(row: Mapping[str, Any]) -> str:
    return f"<pre class=a>{_to_visible_html(row.get('response'))}</pre>"


def _transcript_html(sample: Mapping[str, Any]) -> str:
    """The messages of an answer in harmony format; nothing for others."""
    return "".join(
        f"<p class=w>{_to_html(_name_speaker(writer, speaker))}</p>"
        f"<pre class={'a' if writer == 'policy' else 'e'}>{_to_visible_html(text)}</pre>"
        for writer, speaker, text in sample.get("transcript") or []
    )


def _note_html(sample: Mapping[str, Any]) -> str:
    note = _stop_note(sample)
    return _format_turns(sample, " · ") + (f" · <b>{_to_html(note)}</b>" if note else "")


def _token_html(text: Any, gap: Any, prob: Any) -> str:
    """HTML of one token, with a background from white (|gap| ≤ 1e-5 nats) to red (> 1 nat)."""
    tooltip = f"Δlogp {_format_number(gap, '+.1e')} nats, p {_format_number(prob, '.2g')}"
    level = 0
    if isinstance(gap, int | float):
        level = sum(abs(gap) > bound for bound in (1e-5, 1e-3, 1e-2, 1e-1, 1.0))
    return f'<span class=g{level} title="{escape(tooltip)}">{_to_html(text)}</span>'


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
pre.a {{ background: #eef4fb }} pre.e, span.e {{ background: #ddd; color: #444 }}
p {{ margin: .4em 0 }} .s {{ max-height: 8em; overflow: auto }}
.n {{ color: #555; font-size: .9em }} .w {{ color: #555; margin: .3em 0 0; font-size: .85em }}
q {{ unicode-bidi: isolate; white-space: pre-wrap }}
i {{ color: #a0307a; font-style: normal; font-size: .85em }}
em {{ color: #555 }}
span {{ unicode-bidi: isolate; border-right: 1px solid #c5d5e5 }}
.g1 {{ background: #fdf1d8 }} .g2 {{ background: #fbdfa6 }} .g3 {{ background: #f7b96b }}
.g4 {{ background: #ef8a4f }} .g5 {{ background: #d7301f; color: #fff }}
</style></head><body><h1>{title}</h1>
<p class=n>{shown}. Colour of tokens: |Δlogp| between trainer and engine above
<span class=g1>1e-5</span> <span class=g2>1e-3</span> <span class=g3>0.01</span>
<span class=g4>0.1</span> <span class=g5>1</span> nats; grey: tokens of an environment,
<span class=e>not sampled</span>. Invisible characters are written as
<i>\\x1b</i>.</p>
{body}</body></html>
"""
