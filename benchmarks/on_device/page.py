# SPDX-License-Identifier: Apache-2.0
"""Write docs/results/devices.md from the records of all campaigns, docs/results/devices/*.jsonl.

    python -m benchmarks.on_device.page
    python -m benchmarks.on_device.page --check

Of a stage the newest record that is done counts; without one the newest that has figures, and its
row says how it ended. Of a kernel's case the newest verdict counts. With --check nothing is
written, and the exit status is 1 if the page differs from what the records make.
"""

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.on_device import results
from benchmarks.on_device.schedules import format_schedules
from jaxmoe.plan.chips import CHIPS, Chip
from pallas_kernels.command_line import OneLineParser

ROOT = Path(__file__).resolve().parents[2]
FOLDER, PAGE = ROOT / "docs/results/devices", ROOT / "docs/results/devices.md"
SCHEDULES = ROOT / "docs/results/schedules/tpu.jsonl"  # of schedules.py
INTRO = """# On a lent card

What a campaign of stages said on a GPU: the time of a step and of decoding over random weights of \
the real sizes, kernels against their peers, kernels' cases, short runs. A stage that is done is \
not run again, so a second call goes on where the first ended:

    python -m benchmarks.on_device --out results --minutes 10

`python -m benchmarks.on_device.page` writes this page from the records of all calls, \
`docs/results/devices/*.jsonl`; nothing in it is written by hand. A row whose note has a commit \
was measured at that one and not at its chip's. A stage that did not end by itself keeps what it \
had measured, and its row says so.
"""
VERDICTS = ("right", "wrong", "refused", "error")
PASSES = ("forward", "backward")
GAP = "largest train_rollout_logprob_abs_diff"
SCORES = ("reward/mean", "eval/accuracy", "eval/greedy_accuracy")
DEAREST = 8
NOTHING = "–"

Record = dict[str, Any]  # a line of results.jsonl
Figures = dict[str, Any]
Row = tuple[list[str], list[Record]]  # its cells, and the records that they are from


@dataclass(frozen=True)
class Table:
    """A section of a chip: its rows, and what is said above and below them."""

    title: str
    text: str
    head: Sequence[str]
    rows: list[Row]
    below: tuple[str, ...] = ()


def select_stages(stages: dict[str, Record], kind: str) -> Iterator[tuple[Record, list[Figures]]]:
    for name, record in stages.items():
        if name.startswith(kind):
            yield record, record["figures"]


def merge_figures(figures: list[Figures]) -> Figures:
    """What a stage reports in parts: of its compiled program, then of its runs."""
    return {name: value for part in figures for name, value in part.items()}


# Cells


def format_number(x: float | None, scale: float = 1.0) -> str:
    """Three significant digits, thousands with commas; a dash for what was not measured."""
    if x is None or not math.isfinite(x):
        return NOTHING
    x *= scale
    if x and abs(x) < 1e-4:
        return re.sub(r"e-0?", "e-", f"{x:.2e}")
    digits = 2 - math.floor(math.log10(abs(x))) if x else 0
    return f"{round(x, digits):,.{max(digits, 0)}f}"


def format_gb(x: float | None) -> str:
    return format_number(x, 1e-9)


def format_code(text: str) -> str:
    """A code span that ends no cell; nothing for no text."""
    return f"`{' '.join(text.split()).replace('|', '/').replace('`', chr(39))}`" if text else ""


def format_command(command: str) -> str:
    """The command as it is typed in a shell; early records quote its environment twice."""
    words = []
    for word in shlex.split(command):
        name, is_set, value = word.partition("=")
        if is_set and re.fullmatch("[A-Z_]+", name):
            value = " ".join(shlex.split(value)) if value.startswith("'") else value
            words.append(f'{name}="{value}"' if " " in value else f"{name}={value}")
        else:
            words.append(shlex.quote(word))
    return " ".join(words)


def format_note(records: list[Record], commit: str) -> str:
    """Commits that are not the chip's common one, and ends that are not "done"."""
    commits = dict.fromkeys(x["commit"] for x in records if x["commit"] != commit)
    ends = dict.fromkeys(x["status"] for x in records if x["status"] != results.DONE)
    return ", ".join([*commits, *[f"then {', '.join(ends)}"] * bool(ends)])


# Sections


def limits(stages: dict[str, Record], chip: Chip | None) -> Table:
    rows: list[Row] = [
        (
            [
                x["setting"],
                format_code(x["flags"]) or NOTHING,
                format_number(x["product_tflops"]),
                format_number(x["copy_gbs"]),
            ],
            [record],
        )
        for record, figures in select_stages(stages, "smoke")
        for x in figures
        if "setting" in x
    ]
    sheet = (
        ""
        if chip is None
        else (
            f" Its data sheet says {1e-12 * chip.flops:,.0f} TFLOP/s and "
            f"{1e-9 * chip.memory_bandwidth:,.0f} GB/s."
        )
    )
    return Table(
        "The card's own limits",
        "A product of 8,192 × 8,192 in bfloat16, and a copy of 2 GB, read and written." + sheet,
        ("XLA", "its flags", "product TFLOP/s", "copy GB/s"),
        rows,
    )


def steps(stages: dict[str, Record], chip: Chip | None) -> Table:
    rows: list[tuple[Any, Row]] = []
    for record, figures in select_stages(stages, "step_"):
        x = merge_figures(figures)
        if "seconds" not in x:
            continue
        layers, tuned = x.get("layers"), "autotune_level=0" not in x.get("flags", "")
        settings = list(x.get("settings", []))
        if (size := x.get("microbatch", x["tokens"])) != x["tokens"]:
            settings.insert(0, f"optim.tokens_per_microbatch={size}")
        rows.append(
            (
                (x["model"], layers or 0, x["tokens"], x["sequences"], record["stage"]),
                (
                    [
                        f"{x['model']}, all weights of {layers} layers"
                        if layers
                        else f"{x['model']}, LoRA",
                        f"{x['sequences']} × {x['tokens']:,}",
                        ", ".join([*map(format_code, settings), *["tuned"] * tuned]) or NOTHING,
                        format_number(x["seconds"]),
                        format_number(x["tokens_per_s"]),
                        format_number(x["useful_tflops"]),
                        format_number(x.get("share_of_peak")),
                        format_gb(x["peak_bytes"]),
                        format_gb(x.get("compiler_bytes")),
                        format_gb(x.get("planned_bytes")),
                        format_number(x.get("compile_s")),
                    ],
                    [record],
                ),
            )
        )
    peak = "the data sheet's peak" if chip is None else f"{1e-12 * chip.flops:,.0f} TFLOP/s"
    return Table(
        "A step of RL",
        "Experts in four bits, every sequence of full length; forward, loss, gradient and update. "
        f"Useful work is without recomputation, the share is of {peak}. Memory in GB: the most "
        "that was in use, by the compiler, and as jaxmoe plans it.",
        (
            "model",
            "tokens",
            "settings",
            "s",
            "tokens/s",
            "useful TFLOP/s",
            "share of peak",
            "peak GB",
            "compiler GB",
            "planned GB",
            "compile s",
        ),
        [row for _, row in sorted(rows, key=lambda x: x[0])],
    )


def decoding(stages: dict[str, Record], chip: Chip | None) -> Table:
    rows: list[tuple[Any, Row]] = []
    recomputed = {}
    for record, figures in select_stages(stages, "decode_"):
        x = merge_figures(figures)
        if "seconds_a_token" in x:
            if "recomputed" in x:
                recomputed.setdefault(x["recomputed"], []).append(record["stage"])
            rows.append(
                (
                    (x["model"], x["rows"], x["keys"]),
                    (
                        [
                            x["model"],
                            f"{x['rows']:,}",
                            f"{x['keys']:,}",
                            format_number(x["seconds_a_token"], 1e3),
                            format_number(x["tokens_per_s"]),
                            format_number(x["gb_per_s"]),
                            format_number(x.get("share_of_bandwidth")),
                            format_gb(x["peak_bytes"]),
                            format_number(x.get("compile_s")),
                        ],
                        [record],
                    ),
                )
            )
    peak = "" if chip is None else f", {1e-9 * chip.memory_bandwidth:,.0f} GB/s"
    return Table(
        "Decoding",
        "The native engine: rows that sample a token each, behind so many keys. GB/s counts the "
        "bytes that a token must read: weights, of the experts those that some row chooses, and "
        f"the keys that rows see; the share is of the data sheet's bandwidth{peak}.",
        (
            "model",
            "rows",
            "keys",
            "ms a token",
            "tokens/s",
            "GB/s",
            "share",
            "peak GB",
            "compile s",
        ),
        [row for _, row in sorted(rows, key=lambda x: x[0])],
        tuple(
            f"Computed again after the call, of {', '.join(names)}: {what}."
            for what, names in recomputed.items()
        ),
    )


def pairs(stages: dict[str, Record], chip: Chip | None) -> Table:
    rows: list[tuple[Any, Row]] = []
    for record, figures in select_stages(stages, "pair_"):
        errors = merge_figures(figures).get("errors", {})
        for x in figures:
            if "pass" not in x:
                continue
            peer = x["peer"].rpartition(":")[2]
            key = (x["op"], x["case"], peer, PASSES.index(x["pass"]))
            worst = [max(errors.get(name) or [math.nan]) for name in (x["impl"], x["peer"])]
            rows.append(
                (
                    key,
                    (
                        [
                            x["op"],
                            x["case"],
                            x["pass"],
                            format_number(x["ms"]),
                            "itself" if x["peer"] == x["impl"] else peer,
                            format_number(x["peer_ms"]),
                            f"{format_number(x['speed'])}×",
                            format_number(x["tflops"]),
                            format_number(x["of_matmul"]),
                            " / ".join(map(format_number, worst)),
                        ],
                        [record],
                    ),
                )
            )
    return Table(
        "Kernels against their peers",
        "Ours is `mosaic_gpu`; both sides in bfloat16, checked, then timed in turn in one process. "
        "A ratio above 1: ours is faster. The share is of the product, timed there too. Errors, "
        "ours / the peer's, are the largest of all results, relative to float32. `cudnn`, `sdpa` "
        "and `without_sink` compute attention without sinks: their errors are to that function.",
        (
            "operation",
            "case",
            "pass",
            "ours ms",
            "peer",
            "peer ms",
            "ratio",
            "TFLOP/s",
            "share of product",
            "largest error",
        ),
        [row for _, row in sorted(rows, key=lambda x: x[0])],
    )


def forms(stages: dict[str, Record], chip: Chip | None) -> Table:
    rows: list[Row] = [
        (
            [
                x["product"],
                f"{x['rows']:,}",
                x["form"],
                format_number(x.get("ms")),
                format_number(x.get("gbs")),
                format_number(x.get("tflops")),
                format_number(x["error"]),
                "yes" if x["same_bits"] else "no",
            ],
            [record],
        )
        for record, figures in select_stages(stages, "expert_tiles")
        for x in figures
        if "error" in x
    ]
    return Table(
        "Forms of the kernel of four-bit experts",
        "Of `pallas_kernels/grouped_matmul/hopper/mxfp4_forms.py`, timed in turn at the sizes of "
        "20B. The error is in units of bfloat16's rounding; bits are compared with those of "
        "SINGLE_DECODER.",
        ("product", "rows", "form", "ms", "GB/s", "TFLOP/s", "error", "same bits"),
        rows,
    )


def cases(records: list[Record]) -> Table:
    """The newest verdict of each case, from stages that were ended early too."""
    newest: dict[str, tuple[str, Figures, Record]] = {}
    for record in records:
        group = record["stage"].removeprefix("cases_")
        for x in record["figures"] if group != record["stage"] else ():
            if "verdict" in x:
                newest[x["case"]] = group, x, record
    rows: list[Row] = []
    for group in dict.fromkeys(group for group, _, _ in newest.values()):
        found = [(x, record) for name, x, record in newest.values() if name == group]
        counts = Counter(x["verdict"] for x, _ in found)
        sources = {id(record): mark_end(record) for _, record in found}
        rows.append(([group, *(str(counts[x]) for x in VERDICTS)], list(sources.values())))
    faults = [
        f"- {x['verdict']}: `{name}`, {record['commit']}: {format_code(x['message'])}"
        for name, (_, x, record) in sorted(newest.items())
        if x["verdict"] in ("wrong", "error")
    ]
    return Table(
        "The kernels' cases",
        "Each compared with its formula in float32, several times.",
        ("group", *VERDICTS),
        rows,
        tuple(faults),
    )


def mark_end(record: Record) -> Record:
    """The record of a stage of cases, as done if it came to its end: it fails if a case does."""
    is_whole = any("group" in x for x in record["figures"])
    return {**record, "status": results.DONE} if is_whole else record


def whole_runs(stages: dict[str, Record], chip: Chip | None) -> Table:
    found = [
        (x, record)
        for record, figures in select_stages(stages, "run_")
        for x in figures
        if "config" in x
    ]
    common = set.intersection(*(set(x["settings"]) for x, _ in found)) if len(found) > 1 else set()
    rows: list[Row] = []
    for x, record in found:
        gap = x.get(f"{GAP}_max", x.get(GAP))
        scores = [x.get(f"{name}, first and last") for name in SCORES]
        rows.append(
            (
                [
                    format_code(x["config"]),
                    ", ".join(format_code(s) for s in x["settings"] if s not in common) or NOTHING,
                    f"{x.get('steps', 0)}"
                    + f", ended with status {x['status']}" * bool(x["status"]),
                    format_number(gap),
                    *(NOTHING if s is None else " → ".join(map(format_number, s)) for s in scores),
                    format_number(x.get("median step_s")),
                ],
                [record],
            )
        )
    shared = f" All have {', '.join(f'`{x}`' for x in sorted(common))}." if common else ""
    return Table(
        "Whole runs",
        "`jaxmoe.train` as it is typed. The gap is the largest difference of a token's log-prob "
        f"between engine and trainer, in nats; scores are the first and the last.{shared}",
        ("config", "settings", "steps", "largest gap", "reward", "accuracy", "greedy", "s a step"),
        rows,
    )


def torch_steps(stages: dict[str, Record], chip: Chip | None) -> Table:
    rows: list[Row] = []
    for record, figures in select_stages(stages, "torch_"):
        for x in figures:
            lack = x.get("out_of_memory")
            is_decode = x.get("what") == "decode" or bool(x.get("decode"))
            size = (
                f"{x.get('rows') or x.get('decode')} rows, {x['keys']:,} keys"
                if is_decode
                else f"{x['sequences']} × {x['tokens']:,}"
            )
            rows.append(
                (
                    [
                        "decoding" if is_decode else "step",
                        size,
                        x["attention"],
                        format_number(x.get("step_s")),
                        format_number(x.get("tokens_per_s")),
                        format_code(lack) if lack else format_gb(x.get("peak_bytes")),
                        f"torch {x['torch']}, transformers {x['transformers']}",
                    ],
                    [record],
                )
            )
    return Table(
        "torch and transformers on the same card",
        "GPT-OSS 20B in bfloat16 with peft's adapters on attention only, its experts frozen; "
        "decoding with the same weights. Not in turn with ours.",
        ("what", "tokens", "attention", "s", "tokens/s", "peak GB", "versions"),
        rows,
    )


def dearest(stages: dict[str, Record], chip: Chip | None) -> Table:
    rows: list[Row] = []
    for kind in ("step_", "decode_"):
        for record, figures in select_stages(stages, kind):
            if kind == "step_" and "24k" not in record["stage"]:
                continue
            for i, x in enumerate((merge_figures(figures).get("dearest") or [])[:DEAREST]):
                name = re.sub(r"void cutlass::Kernel2<(\w+)>.*", r"\1", x["name"])[:60]
                rows.append(
                    (
                        [
                            record["stage"] if i == 0 else "",
                            format_code(name),
                            format_number(100 * x["share"]) + " %",
                        ],
                        [record],
                    )
                )
    return Table(
        "The dearest operations",
        f"Shares of the device's time by JAX's profiler, the first {DEAREST}.",
        ("stage", "operation", "share"),
        rows,
    )


def unfinished(records: list[Record]) -> Table:
    """Stages whose newest record is not done, cases apart that came to their end with faults."""
    newest = {x["stage"]: mark_end(x) for x in records}
    rows: list[Row] = [
        (
            [
                name,
                x["status"],
                format_number(x["seconds"]),
                format_code(x.get("message", "")[:200]),
            ],
            [{**x, "status": results.DONE}],
        )
        for name, x in sorted(newest.items())
        if x["status"] != results.DONE
    ]
    return Table(
        "What came to no good end",
        "Stages whose last try failed, passed its limit of time or memory, or was cut off when the "
        "campaign's time was over.",
        ("stage", "how it ended", "after s", "message"),
        rows,
    )


# The page

BEFORE_CASES = (limits, steps, decoding, pairs, forms)
AFTER_CASES = (whole_runs, torch_steps, dearest)


def format_table(table: Table, commit: str) -> str:
    """The section as Markdown, with the command of its first row; nothing without rows."""
    if not table.rows:
        return ""
    notes = [format_note(records, commit) for _, records in table.rows]
    lines = [table.head, *(cells for cells, _ in table.rows)]
    if any(notes):
        lines = [[*cells, note] for cells, note in zip(lines, ("note", *notes), strict=True)]
    head, *rows = ("| " + " | ".join(cells) + " |" for cells in lines)
    command = format_command(table.rows[0][1][0]["command"])
    return "\n".join(
        [
            f"### {table.title}",
            "",
            table.text,
            "",
            f"The first row again: `{command}`",
            "",
            head,
            "|" + "---|" * len(lines[0]),
            *rows,
            "",
            *table.below,
            *[""] * bool(table.below),
        ]
    )


def format_chip(name: str, records: list[Record]) -> str:
    """All sections of a chip, below what its records have in common."""
    stages = results.choose_records(records)
    commit = Counter(x["commit"] for x in stages.values()).most_common(1)[0][0]
    chip = next((CHIPS[x] for x in CHIPS if x in name.lower()), None)
    drivers = {(re.findall(r"\d+\.\d+\.\d+", x["driver"]) or [x["driver"]])[0] for x in records}
    about = (
        f"Driver {', '.join(sorted(drivers))}; "
        f"jax {', '.join(sorted({x['jax'].split()[0] for x in records}))}; "
        f"{', '.join(sorted({x['date'] for x in records}))}; commit {commit}."
    )
    tables = (
        *(section(stages, chip) for section in BEFORE_CASES),
        cases(records),
        *(section(stages, chip) for section in AFTER_CASES),
        unfinished(records),
    )
    sections = (format_table(table, commit) for table in tables)
    return "\n".join([f"## {name}", "", about, "", *filter(None, sections)])


def make_page(folder: Path) -> str:
    """The page of all records in a folder. Raises BadRecords."""
    chips = results.load_chips(folder)
    sections = [INTRO, *(format_chip(name, records) for name, records in chips.items())]
    if SCHEDULES.exists():
        sections.append(format_schedules(SCHEDULES))
    return "\n".join(sections)


def main(argv: list[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = OneLineParser("python -m benchmarks.on_device.page", __doc__)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args = parser.parse_args(argv)
    try:
        text = make_page(FOLDER)
    except (OSError, results.BadRecords) as error:
        parser.error(f"{FOLDER} must hold records of campaigns: {error}.")
    if args.check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(
                f"{PAGE} must be what the records make; it differs. "
                "Type python -m benchmarks.on_device.page",
                file=sys.stderr,
            )
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
