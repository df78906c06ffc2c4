# SPDX-License-Identifier: Apache-2.0
"""The printed report of the doctor: tables, findings, the verdict and the setting to change."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxmoe.reconcile.batch_invariance import BatchInvariance
from jaxmoe.reconcile.compare import Report
from jaxmoe.reconcile.op_comparison import OpComparison
from jaxmoe.records import Rollout


def print_report(
    report: Report,
    rollouts: Sequence[Rollout],
    decode: Callable[[list[int]], str],
    weights_name: str,
) -> None:
    """Print the tables, the findings, then the verdict."""
    console = Console(highlight=False)
    if report.verdict.kind != "not judged":
        _print_numbers(console, report, rollouts, decode, weights_name)
    for f in report.findings:
        console.print(
            f"{f.category}: {f.requirement}; {f.actual}.\n  change: {f.fix}",
            markup=False,
            soft_wrap=True,
        )
    # A fix may hold brackets, which rich would take for markup.
    for line in format_verdict(report):
        console.print(line, markup=False, soft_wrap=True)


def _print_numbers(
    console: Console,
    report: Report,
    rollouts: Sequence[Rollout],
    decode: Callable[[list[int]], str],
    weights_name: str,
) -> None:
    metrics, verdict, rounding = report.metrics, report.verdict, report.rounding.unit
    console.print(
        f"{metrics['tokens']:.0f} sampled tokens of {len(rollouts)} answers, {weights_name}\n"
        f"|Δlogp| mean {verdict.gap:.2e}  p50 {metrics['gap_p50']:.1e}  "
        f"p90 {metrics['gap_p90']:.1e}  p99 {metrics['gap_p99']:.1e}  "
        f"max {metrics['train_rollout_logprob_abs_diff_max']:.1e}   "
        f"(signed {metrics['gap_mean_signed']:+.1e}; rounding {rounding:.1e})\n"
        f"k1 {metrics['rollout_corr/kl']:+.2e}  k3 {metrics['rollout_corr/k3_kl']:.2e}  "
        f"χ² {metrics['rollout_corr/chi2_token']:+.2e}  ESS {metrics['rollout_corr/ess']:.4f}  "
        f"r {metrics['rollout_actor_probs_pearson_corr']:.6f}",
        markup=False,
    )
    console.print(_worst_table(report, rollouts, decode))
    if report.layers:
        console.print(_layer_table(report))
    if verdict.nearest():
        console.print(_ranked_table(report))


def format_verdict(report: Report) -> list[str]:
    """Return the verdict: the result, the measured gap, and the setting to change."""
    v = report.verdict
    if v.kind == "agree":
        head = "AGREE" if report.agrees else "AGREE, but see the findings above"
        return [f"{head}: mean |Δlogp| {v.gap:.2e}; {v.reason}."]
    if v.kind == "not judged":
        return [f"NOT JUDGED: {v.reason}."]
    workaround = (
        "Until the cause is found, use --set loss.rollout_correction='token_is(high=2.0)', or "
        "--set rollout.engine=native with a new --workdir."
    )
    if v.kind == "unexplained":
        ranked = ", ".join(
            f"{format_faults(faults)} {remaining:.1e}" for faults, remaining in v.nearest()[:3]
        )
        nearest = f"Nearest: {ranked}" if ranked else "No fault explains a fifth of it"
        return [f"UNEXPLAINED: mean |Δlogp| {v.gap:.2e}; {v.reason}. {nearest}. {workaround}"]
    if v.kind == "partly":
        return [
            f"PARTLY: {format_faults(v.faults)} {v.reason}. mean |Δlogp| {v.gap:.2e}: it is not "
            f"the cause, or not the only one. {workaround}"
        ]
    ties = f" Equally good: {', '.join(v.also)}." if v.also else ""
    head = (
        f"DISAGREE: {format_faults(v.faults)}. mean |Δlogp| {v.gap:.2e}, {v.remaining:.2e} with "
        f"this fault recomputed; {v.reason}."
    )
    return [head + ties, *(f"  {f.requirement}\n  change: {f.fix}" for f in v.faults)]


def format_faults(faults: Sequence[Any]) -> str:
    """Return the names of faults, and the value of a fitted number to its known digits."""

    def format_fault(f: Any) -> str:
        if f.value is None:
            return f.name
        return f"{f.name} {f.value:.4g} ± {f.spread:.0e}" if f.spread else f"{f.name} {f.value:.4g}"

    return " + ".join(format_fault(f) for f in faults)


def _worst_table(
    report: Report, rollouts: Sequence[Rollout], decode: Callable[[list[int]], str]
) -> Table:
    table = Table(title="tokens with the largest gaps", title_justify="left")
    for column, width in (("end of prompt", 18), ("answer", 12), ("token", 12)):
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=width)
    for column in ("engine", "trainer", "Δ"):
        table.add_column(column, justify="right", no_wrap=True, min_width=9)
    for t in report.worst:
        r = rollouts[t.row]
        cells = r.prompt.text[-16:], decode(r.tokens[: t.position].tolist())[-10:], decode([t.id])
        numbers = f"{t.engine:.5f}", f"{t.trainer:.5f}", f"{t.trainer - t.engine:+.2e}"
        table.add_row(*(escape(repr(c)) for c in cells), *numbers)
    return table


def _layer_table(report: Report) -> Table:
    table = Table(title="share of tokens whose experts differ", title_justify="left")
    for column in ("layer", "total", "this layer alone", "largest regret", "median margin"):
        table.add_column(column, justify="right")
    for x in sorted(report.layers, key=lambda x: -x.switched)[:12]:
        table.add_row(
            str(x.layer),
            f"{x.switched:.3%}",
            f"{x.switched_replayed:.3%}",
            f"{x.regret:.1e}",
            f"{x.margin:.1e}",
        )
    table.caption = f"mean |Δlogp| with the engine's experts in the trainer: {report.replayed:.2e}"
    return table


def _ranked_table(report: Report) -> Table:
    v = report.verdict
    table = Table(
        title="possible faults of the engine, best explanation first", title_justify="left"
    )
    for column in ("category", "hypothesis", "remaining |Δlogp|", "of the gap"):
        table.add_column(column)
    for faults, remaining in v.nearest()[:10]:
        table.add_row(
            faults[0].category,
            format_faults(faults),
            f"{remaining:.2e}",
            f"{remaining / v.gap:.1%}",
        )
    return table


def print_batch_invariance(result: BatchInvariance) -> None:
    """Print whether the engine's log-probs depend on the other rows of the batch."""
    agreement = "equal to the bit" if result.max_gap == 0.0 else f"max |Δlogp| {result.max_gap:.1e}"
    print(
        f"batch invariance: {result.answers} answers sampled without the other rows; "
        f"{result.n_same} of {result.tokens} tokens the same, their log-probs "
        f"{agreement if result.n_same else 'not compared'}"
    )


def print_op_comparison(comparison: OpComparison) -> None:
    """Print the ops of the model with the effect of each on the log-probs."""
    table = Table(
        title="per-op comparison with vLLM, which reads a sequence in one pass",
        title_justify="left",
    )
    for column in ("op", "values that differ", "largest", "mean |Δlogp| of this op"):
        table.add_column(column, justify="left" if column == "op" else "right")
    for op in comparison.ops:
        cells = f"{op.share_different:.1%}", f"{op.max_difference:.1e}", f"{op.gap:.1e}"
        table.add_row(op.op, *cells)
    table.caption = f"mean |Δlogp| of all ops, on {comparison.tokens} tokens: {comparison.gap:.1e}"
    Console(highlight=False).print(table)
