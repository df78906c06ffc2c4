# SPDX-License-Identifier: Apache-2.0
"""What the doctor prints: tables, findings, the verdict and what to type."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxmoe.reconcile.company import Company
from jaxmoe.reconcile.compare import Report
from jaxmoe.reconcile.ladder import Ladder
from jaxmoe.records import Rollout


def show(
    report: Report, rollouts: Sequence[Rollout], decode: Callable[[list[int]], str], where: str,
) -> None:  # fmt: skip
    """Tables, then the verdict."""
    console = Console(highlight=False)
    if report.verdict.kind != "not judged":
        _numbers(console, report, rollouts, decode, where)
    for f in report.findings:
        console.print(
            f"{f.category}: {f.must}; {f.got}.\n  change: {f.fix}", markup=False, soft_wrap=True
        )
    for line in verdict_lines(report):
        console.print(line, markup=False, soft_wrap=True)


def _numbers(
    console: Console, report: Report, rollouts: Sequence[Rollout],
    decode: Callable[[list[int]], str], where: str,
) -> None:  # fmt: skip
    m, v, alone = report.metrics, report.verdict, report.rounding.unit
    console.print(
        f"{m['tokens']:.0f} sampled tokens of {len(rollouts)} answers, {where}\n"
        f"|Δlogp| mean {v.gap:.2e}  p50 {m['gap_p50']:.1e}  p90 {m['gap_p90']:.1e}  "
        f"p99 {m['gap_p99']:.1e}  max {m['train_rollout_logprob_abs_diff_max']:.1e}   "
        f"(signed {m['gap_mean_signed']:+.1e}; rounding alone {alone:.1e})\n"
        f"k1 {m['rollout_corr/kl']:+.2e}  k3 {m['rollout_corr/k3_kl']:.2e}  "
        f"χ² {m['rollout_corr/chi2_token']:+.2e}  ESS {m['rollout_corr/ess']:.4f}  "
        f"r {m['rollout_actor_probs_pearson_corr']:.6f}",
        markup=False,
    )
    console.print(_worst(report, rollouts, decode))
    if report.layers:
        console.print(_layers(report))
    if v.nearest():
        console.print(_ranked(report))


def verdict_lines(report: Report) -> list[str]:
    """What must hold, what was measured, what to type."""
    v = report.verdict
    if v.kind == "agree":
        head = "AGREE" if report.agrees else "FINDINGS ABOVE; the log-probs agree"
        return [f"{head}: mean |Δlogp| {v.gap:.2e}; {v.why}."]
    if v.kind == "not judged":
        return [f"NOT JUDGED: {v.why}."]
    meanwhile = (
        "Until it is explained: --set loss.rollout_correction='token_is(high=2.0)', or --set "
        "rollout.engine=native, with a new --workdir."
    )
    if v.kind == "unexplained":
        ranked = ", ".join(f"{names(faults)} {left:.1e}" for faults, left in v.nearest()[:3])
        near = f"Nearest: {ranked}" if ranked else "Nothing that was tried explains a fifth of it"
        return [f"UNEXPLAINED: mean |Δlogp| {v.gap:.2e}; {v.why}. {near}. {meanwhile}"]
    if v.kind == "partly":
        return [
            f"PARTLY: {names(v.faults)} {v.why}. mean |Δlogp| {v.gap:.2e}: it is not the cause, or "
            f"not all of it. {meanwhile}"
        ]
    also = f" As good: {', '.join(v.also)}." if v.also else ""
    head = f"DISAGREE: {names(v.faults)}. mean |Δlogp| {v.gap:.2e}, {v.left:.2e} left; {v.why}."
    return [head + also, *(f"  {f.must}\n  change: {f.fix}" for f in v.faults)]


def names(faults: Sequence[Any]) -> str:
    """A fitted number with its value, to as many digits as it is known."""

    def said(f: Any) -> str:
        if f.value is None:
            return f.name
        return f"{f.name} {f.value:.4g} ± {f.spread:.0e}" if f.spread else f"{f.name} {f.value:.4g}"

    return " + ".join(said(f) for f in faults)


def _worst(
    report: Report, rollouts: Sequence[Rollout], decode: Callable[[list[int]], str]
) -> Table:
    table = Table(title="the worst tokens", title_justify="left")
    for column, width in (("answer to", 18), ("so far", 12), ("token", 12)):
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=width)
    for column in ("engine", "trainer", "Δ"):
        table.add_column(column, justify="right", no_wrap=True, min_width=9)
    for t in report.worst:
        r = rollouts[t.row]
        cells = r.prompt.text[-16:], decode(r.tokens[: t.at].tolist())[-10:], decode([t.id])
        numbers = f"{t.engine:.5f}", f"{t.trainer:.5f}", f"{t.trainer - t.engine:+.2e}"
        table.add_row(*(escape(repr(c)) for c in cells), *numbers)
    return table


def _layers(report: Report) -> Table:
    table = Table(title="experts that differ, share of tokens", title_justify="left")
    for column in ("layer", "in all", "of this layer", "largest regret", "median margin"):
        table.add_column(column, justify="right")
    for x in sorted(report.layers, key=lambda x: -x.switched)[:12]:
        table.add_row(
            str(x.layer), f"{x.switched:.3%}", f"{x.switched_here:.3%}", f"{x.regret:.1e}",
            f"{x.margin:.1e}",
        )  # fmt: skip
    table.caption = f"mean |Δlogp| with the engine's experts in the trainer: {report.replayed:.2e}"
    return table


def _ranked(report: Report) -> Table:
    v = report.verdict
    table = Table(title="what the engine may do otherwise, best first", title_justify="left")
    for column in ("category", "hypothesis", "mean |Δlogp| left", "of the gap"):
        table.add_column(column)
    for faults, left in v.nearest()[:10]:
        table.add_row(faults[0].category, names(faults), f"{left:.2e}", f"{left / v.gap:.1%}")
    return table


def show_company(found: Company) -> None:
    """Whether the engine's numbers depend on what else it computes."""
    what = "the same to the bit" if found.largest == 0.0 else f"max |Δlogp| {found.largest:.1e}"
    print(
        f"company  {found.answers} answers drawn without the others: {found.same} of "
        f"{found.tokens} tokens the same, their log-probs {what if found.same else 'not compared'}"
    )


def show_ladder(found: Ladder) -> None:
    """The pieces of the model, with what each alone does to the log-probs."""
    table = Table(
        title="piece by piece from the trainer to vLLM, which reads a prompt at once",
        title_justify="left",
    )
    for column in ("piece", "numbers that differ", "largest", "mean |Δlogp| of it alone"):
        table.add_column(column, justify="left" if column == "piece" else "right")
    for rung in found.rungs:
        cells = f"{rung.differ:.1%}", f"{rung.largest:.1e}", f"{rung.gap:.1e}"
        table.add_row(rung.piece, *cells)
    table.caption = f"mean |Δlogp| of all of it, on {found.tokens} tokens: {found.gap:.1e}"
    Console(highlight=False).print(table)
