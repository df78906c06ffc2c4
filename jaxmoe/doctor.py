# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.doctor --config FILE`: do engine and trainer agree, and if not, why.

It takes the run's newest checkpoint (or the weights the config starts from), loads it into the
config's engine, samples held-out prompts, and recomputes what the engine said. Exit status: 0
they agree, 1 they do not, 2 a mistake in what was typed.
Next: jaxmoe/reconcile/compare.py.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxmoe.checkpoint.run import initial_params, restore_run
from jaxmoe.cli import ExitStatus, parse
from jaxmoe.config import Config, ConfigError, EngineError, require
from jaxmoe.data.pipeline import make_prompt
from jaxmoe.data.tokenizer import Tokenizer, load_tokenizer
from jaxmoe.dry_run import dry_run
from jaxmoe.engines import open_engine
from jaxmoe.envs.tasks import Task, contents, open_task
from jaxmoe.kernels import kernels_here
from jaxmoe.memory import check_memory, stage
from jaxmoe.model import Ops, make_ops
from jaxmoe.observe.gap_plot import plot_gap
from jaxmoe.observe.printable import printable
from jaxmoe.observe.progress import phase
from jaxmoe.reconcile.checks import run_checks
from jaxmoe.reconcile.compare import Report, reconcile
from jaxmoe.reconcile.handshake import config_finding, shake
from jaxmoe.reconcile.recompute import Programs, head, trunk
from jaxmoe.records import Prompt, Rollout
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import stage_shapes
from jaxmoe.rollout.engine import Engine
from jaxmoe.shapes import Params

PROMPTS, SAMPLES = 32, 2  # held-out prompts, answers to each
UNBOUNDED = 1e9  # of the engine's own probe: the doctor wants to see what it would refuse


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        cfg, looks = parse(argv, "Compare the engine with the trainer, and explain the gap.")
        if looks:
            dry_run(cfg, stage(cfg))
        elif not run(cfg):
            status.code = 1
    return status.code


def run(cfg: Config) -> bool:
    """Whether they agree; the report goes to the terminal and into the run folder."""
    require(
        cfg.mesh.devices == 1,
        f"the doctor compares on one device, and mesh has {cfg.mesh.devices}. Try "
        + " ".join(f"--set mesh.{name}=1" for name, size in cfg.mesh.sizes.items() if size > 1),
    )
    require(
        not cfg.lora.ranks,
        f"the doctor must have whole weights to compare, and {cfg.workdir} has adapters. Try "
        "python -m jaxmoe.export --merge --out DIR, and the doctor with a config without lora and "
        "--set init.checkpoint=DIR.",
    )
    kernels = kernels_here(cfg)  # before this process opens the device
    ops = make_ops(cfg, kernels.of_any_dtype)
    check_memory(cfg, stage(cfg))
    kernels.tell()
    work, task = Path(cfg.workdir), open_task(cfg)
    params, before, version, where = newest_weights(cfg, work, contents(cfg, task))
    vllm = replace(cfg.rollout.vllm, probe_abs_diff=UNBOUNDED)
    patient = replace(cfg, rollout=replace(cfg.rollout, vllm=vllm))
    prompts = task.held_out_prompts()[:PROMPTS]
    with closing(open_engine(patient, ops, work)) as engine:
        with phase(f"loading {where} into the {cfg.rollout.engine} engine"):
            try:
                if before is not None:  # what a loader forgets is then this, not random weights
                    engine.load(before, version - 1)
                engine.load(params, version)
            except EngineError as error:
                return not_loaded(error, work, where)
        with phase(f"sampling {SAMPLES} answers to {len(prompts)} held-out prompts"):
            rollouts = engine.generate(prompts, task.sampling, seed=3, samples=SAMPLES)
        loaded = loaded_states(engine, cfg)
    with phase("recomputing"):
        report = examine(cfg, task, rollouts, params, before, version, loaded, ops)
    show(report, rollouts, task, where)
    write(report, work, where)
    return report.agrees


def not_loaded(error: EngineError, work: Path, where: str) -> bool:
    """The engine did not come to hold the weights: the error names the tensors, or what broke."""
    print(f"DISAGREE: the engine does not hold {where}. {printable(str(error))}")
    work.mkdir(parents=True, exist_ok=True)
    record = {"weights": where, "agrees": False, "verdict": "refused", "why": str(error)}
    (work / "doctor.json").write_text(json.dumps(record, indent=2) + "\n")
    return False


def newest_weights(
    cfg: Config, work: Path, held: dict[str, str] | None = None
) -> tuple[Params, Params | None, int, str]:
    """Weights, those the run began with where they are others, version, and what to call them."""
    optimizers = make_optimizer(cfg.optim, steps=cfg.warmup.steps), rl_optimizer(cfg)
    at = restore_run(work, cfg, stage_shapes(cfg, *optimizers), to_train=False, contents=held)
    first = initial_params(cfg)
    if at is None:
        return first, None, 0, "the initial weights"
    return at.state.params.policy, first, at.step, f"{at.stage} step {at.step}"


def loaded_states(engine: Engine, cfg: Config) -> list[dict[str, Any]]:
    """What the engine's processes report of themselves, where they can."""
    if cfg.rollout.engine != "vllm":
        return []
    from jaxmoe.vllm.engine import VllmEngine  # runs without its packages otherwise

    assert isinstance(engine, VllmEngine)
    return [worker for backend in engine.backends for worker in backend.loaded_state()]


def examine(
    cfg: Config, task: Task, rollouts: Sequence[Rollout], params: Params,
    before: Params | None, version: int, loaded: Sequence[dict[str, Any]], ops: Ops,
) -> Report:  # fmt: skip
    """The report of these rollouts."""
    tokenizer, theirs = task.tokenizer, None
    if cfg.init.checkpoint and (Path(cfg.init.checkpoint) / "tokenizer.json").is_file():
        theirs = partial(prompt_ids, task, load_tokenizer(cfg.init.checkpoint))
    found = {
        f.name: f
        for worker in (loaded or [None])
        for f in run_checks(rollouts, task.sampling, cfg.model.vocab_size, version,
                       encode=partial(prompt_ids, task, tokenizer), their_encode=theirs,
                       loaded=worker)
    }  # fmt: skip
    told = shake(loaded, cfg.model)
    if cfg.rollout.engine == "native":
        told = replace(told, dtype=cfg.model.dtype)
    if told.other:
        finding = config_finding(told.other, cfg.model)
        found = {finding.name: finding} | found
    try:
        start_id = tokenizer.special("<|startoftext|>")
    except ConfigError:
        start_id = None
    return reconcile(
        rollouts, params, cfg.model, task.sampling,
        run=Programs(
            jax.jit(partial(trunk, ops=ops), static_argnames="cfg"),
            jax.jit(partial(head, ops=ops), static_argnames=("cfg", "top_k", "top_p")),
        ),
        previous=before, start_id=start_id, told=told,
        findings=list(found.values()),
    )  # fmt: skip


def prompt_ids(task: Task, tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Of a held-out prompt, as this tokenizer renders its row."""
    return make_prompt(task.held_out, prompt.id, tokenizer, task.template, sys.maxsize).tokens


def show(report: Report, rollouts: Sequence[Rollout], task: Task, where: str) -> None:
    """Tables, then the verdict."""
    console = Console(highlight=False)
    if report.verdict.kind != "not judged":
        _numbers(console, report, rollouts, task, where)
    for f in report.findings:
        console.print(
            f"{f.category}: {f.must}; {f.got}.\n  change: {f.fix}", markup=False, soft_wrap=True
        )
    for line in verdict_lines(report):
        console.print(line, markup=False, soft_wrap=True)


def _numbers(
    console: Console, report: Report, rollouts: Sequence[Rollout], task: Task, where: str
) -> None:
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
    console.print(_worst(report, rollouts, task))
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


def _worst(report: Report, rollouts: Sequence[Rollout], task: Task) -> Table:
    table = Table(title="the worst tokens", title_justify="left")
    for column, width in (("answer to", 18), ("so far", 12), ("token", 12)):
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=width)
    for column in ("engine", "trainer", "Δ"):
        table.add_column(column, justify="right", no_wrap=True, min_width=9)
    decode = task.tokenizer.decode
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


def write(report: Report, work: Path, where: str) -> None:
    """doctor.json and plots/doctor.png."""
    v = report.verdict
    record = {
        "weights": where,
        "agrees": report.agrees,
        "verdict": v.kind,
        "faults": [{"name": f.name, "category": f.category, "must": f.must, "change": f.fix,
                    "value": f.value, "spread": f.spread if f.value is not None else None}
                   for f in v.faults],
        "why": v.why,
        "gap": v.gap,
        "left": v.left,
        "also": v.also,
        "rounding": {"own": report.rounding.own, "engine": report.rounding.engine},
        "ranked": [{"faults": [f.name for f in faults], "left": left} for faults, left in v.ranked],
        "findings": [dataclasses.asdict(f) for f in report.findings],
        "metrics": report.metrics,
        "worst": [dataclasses.asdict(t) for t in report.worst],
        "layers": [dataclasses.asdict(x) for x in report.layers],
        "replayed": report.replayed,
    }  # fmt: skip
    work.mkdir(parents=True, exist_ok=True)
    (work / "doctor.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"report   {work / 'doctor.json'}")
    if v.kind == "not judged":
        return
    picture = work / "plots" / "doctor.png"
    layers = [(x.switched, x.switched_here) for x in report.layers]
    plot_gap(picture, report.engine_N, report.trainer_N, verdict_lines(report)[0][:110], layers)
    print(f"plot     {picture}")


if __name__ == "__main__":
    sys.exit(main())
