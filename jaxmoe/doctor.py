# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.doctor --config FILE`: whether engine and trainer agree, and if not, why.

The command loads the run's newest checkpoint (or the weights the config starts from) into the
config's engine, samples answers to held-out prompts, and recomputes their log-probs. Exit status: 0
they agree, 1 they do not, 2 a usage error.
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
import numpy as np

from jaxmoe.checkpoint.run import initial_params, restore_policy
from jaxmoe.cli import ExitStatus, parse_config
from jaxmoe.collection.tasks import Task, digest_contents, open_task
from jaxmoe.config import Config, ConfigError, EngineError, describe_engine, require
from jaxmoe.data.pipeline import make_prompt
from jaxmoe.data.tokenizer import Tokenizer, load_tokenizer
from jaxmoe.model import Ops, make_ops
from jaxmoe.model.rounded import decode_rounded, decode_trained, engine_only_rounding
from jaxmoe.observe.gap_plot import plot_gap
from jaxmoe.observe.printable import escape_unprintable
from jaxmoe.observe.progress import report_phase
from jaxmoe.reconcile.batch_invariance import BatchInvariance, compare_batches
from jaxmoe.reconcile.checks import run_checks
from jaxmoe.reconcile.compare import Report, explain_gap
from jaxmoe.reconcile.handshake import config_finding, read_handshake
from jaxmoe.reconcile.hypotheses import RoundEngine
from jaxmoe.reconcile.op_comparison import (
    ComparisonPrograms,
    OpComparison,
    compare_ops,
    compute_op_differences,
    read_recording,
    score_with_differences,
)
from jaxmoe.reconcile.printed import (
    format_verdict,
    print_batch_invariance,
    print_op_comparison,
    print_report,
)
from jaxmoe.reconcile.recompute import Programs, run_head, run_trunk
from jaxmoe.reconcile.reported_experts import check_reported_experts
from jaxmoe.records import Prompt, Rollout
from jaxmoe.rewards.sandbox_rewards import describe_run_sandbox
from jaxmoe.rollout.engine import Engine, Inspectable, open_engine
from jaxmoe.run.dry_run import dry_run
from jaxmoe.run.kernels import choose_run_kernels
from jaxmoe.run.memory import check_memory
from jaxmoe.run_files import replace_text
from jaxmoe.shapes import Params

N_PROMPTS, N_SAMPLES = 32, 2  # held-out prompts, and answers to each
N_RECORDED_SEQUENCES = 4  # for the per-op comparison


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        cfg, dry_run_only = parse_config(
            argv, "Compare the engine with the trainer, and explain the gap."
        )
        if dry_run_only:
            dry_run(cfg, "scoring")
        elif not run_doctor(cfg):
            status.code = 1
    return status.code


def run_doctor(cfg: Config) -> bool:
    """Return True if engine and trainer agree; print the report and write it to the run folder."""
    require(
        cfg.mesh.devices == 1,
        f"the doctor runs on one device, but mesh has {cfg.mesh.devices}. Try "
        + " ".join(f"--set mesh.{name}=1" for name, size in cfg.mesh.sizes.items() if size > 1),
    )
    require(
        not cfg.lora.ranks,
        f"the doctor compares full weights, but {cfg.workdir} has LoRA adapters. Try "
        "python -m jaxmoe.export --merge --out DIR, then the doctor with a config without lora and "
        "--set init.checkpoint=DIR.",
    )
    require(
        cfg.router.is_top_k,
        f"the doctor recomputes log-probs with GPT-OSS's router, and router.route is "
        f"{cfg.router.route}: it would report your router as a fault of the engine.",
    )
    # Before this process opens the device, because a TPU admits one process and the check is
    # another.
    kernels = choose_run_kernels(cfg)
    ops = make_ops(cfg, kernels.with_xla_fallback)
    check_memory(cfg, "scoring")
    kernels.print_decision()
    work, task = Path(cfg.workdir), open_task(cfg)
    if sandbox := describe_run_sandbox(cfg, (*task.rewards, *task.second_grader)):
        print(f"sandbox: {sandbox}")
    params, previous, version, weights_name = load_newest_weights(
        cfg, work, digest_contents(cfg, task)
    )
    engine_cfg = describe_engine(cfg).without_weight_check(cfg)
    round_engine = engine_only_rounding(cfg)
    round_engine = round_engine and jax.jit(round_engine)
    prompts = task.held_out_prompts()[:N_PROMPTS]
    with closing(open_engine(engine_cfg, ops, work)) as engine:
        with report_phase(f"loading {weights_name} into the {cfg.rollout.engine} engine"):
            try:
                if previous is not None:
                    # A tensor that the loader forgets is then one of known weights, which the
                    # comparison can name, and not a random one.
                    engine.load(previous, version - 1)
                engine.load(params if round_engine is None else round_engine(params), version)
            except EngineError as error:
                return report_not_loaded(error, work, weights_name)
        with report_phase(f"sampling {N_SAMPLES} answers to {len(prompts)} held-out prompts"):
            rollouts = task.sample(
                engine, prompts, task.sampling, seed=3, samples=N_SAMPLES, held_out=True
            )
            # The same prompt and seed without the other rows: what differs is an effect of the
            # batch.
            rollouts_single = task.sample(
                engine, prompts[:1], task.sampling, seed=3, samples=N_SAMPLES, held_out=True
            )
        loaded = engine.loaded_states() if isinstance(engine, Inspectable) else []
        recorded = record_modules(engine, rollouts, cfg)
    with report_phase("recomputing log-probs"):
        report = examine_rollouts(
            cfg, task, rollouts, params, previous, version, loaded, ops, round_engine
        )
    print_report(report, rollouts, task.tokenizer.decode, weights_name)
    batch_invariance = compare_batches(rollouts[:N_SAMPLES], rollouts_single)
    print_batch_invariance(batch_invariance)
    op_comparison = None
    if recorded is not None and report.agrees:
        with report_phase("comparing op by op"):
            forwards = compute_op_differences, score_with_differences
            programs = ComparisonPrograms(
                *(jax.jit(partial(f, cfg=cfg.model, ops=ops)) for f in forwards)
            )
            op_comparison = compare_ops(params, *recorded, programs)
        print_op_comparison(op_comparison)
    write_report(report, work, weights_name, batch_invariance, op_comparison)
    return report.agrees


def report_not_loaded(error: EngineError, work: Path, weights_name: str) -> bool:
    """Report that the engine failed to load the weights, and return False."""
    print(f"DISAGREE: the engine failed to load {weights_name}. {escape_unprintable(str(error))}")
    work.mkdir(parents=True, exist_ok=True)
    record = {"weights": weights_name, "agrees": False, "verdict": "refused", "why": str(error)}
    replace_text(work / "doctor.json", json.dumps(record, indent=2) + "\n")
    return False


def load_newest_weights(
    cfg: Config, work: Path, expected_contents: dict[str, str] | None = None
) -> tuple[Params, Params | None, int, str]:
    """Return the newest weights, the initial ones if others, the version, and a name.

    The newest have the trainer's values, the initial ones those that an engine gets.
    """
    saved = restore_policy(work, cfg, None, contents=expected_contents)
    # Dense arrays of the values that are read: the checks below look into them.
    initial = initial_params(cfg)
    if saved is None:
        return decode_trained(initial, cfg), None, 0, "the initial weights"
    return (
        decode_trained(saved.params, cfg),
        decode_rounded(initial, cfg),
        saved.step,
        f"{saved.stage} step {saved.step}",
    )


def record_modules(
    engine: Engine, rollouts: Sequence[Rollout], cfg: Config
) -> tuple[np.ndarray, list[dict[str, np.ndarray]]] | None:
    """Return a few sequences, cut to one length, and the outputs of the engine's modules for them.

    None unless the engine can record them, and is one process.
    """
    if not isinstance(engine, Inspectable):
        return None
    sequences = [
        [*r.prompt.tokens, *r.tokens.tolist()] for r in rollouts[::N_SAMPLES][:N_RECORDED_SEQUENCES]
    ]
    # Cut to one length, because the comparison by op has no padding.
    tokens_BT = np.array([row[: min(map(len, sequences))] for row in sequences], np.int32)
    recorded = []
    for row in tokens_BT.tolist():
        try:
            logp, workers = engine.record_forward(row)
        except EngineError as error:
            print(f"per-op comparison: skipped; {escape_unprintable(str(error))}")
            return None
        # Each worker has a shard of every tensor, which cannot be compared with a full one.
        if len(workers) > 1:
            return None
        recorded.append(read_recording(workers[0], logp, cfg.model))
    return tokens_BT, recorded


def examine_rollouts(
    cfg: Config,
    task: Task,
    rollouts: Sequence[Rollout],
    params: Params,
    previous: Params | None,
    version: int,
    loaded: Sequence[dict[str, Any]],
    ops: Ops,
    round_engine: RoundEngine | None = None,
) -> Report:
    """Run the checks and the comparison, and return the report of these rollouts."""
    tokenizer, engine_encode = task.tokenizer, None
    rollouts, expert_findings = check_reported_experts(
        rollouts, cfg.model, needed=cfg.records_experts
    )
    if cfg.init.checkpoint and (Path(cfg.init.checkpoint) / "tokenizer.json").is_file():
        engine_encode = partial(encode_prompt, task, load_tokenizer(cfg.init.checkpoint))
    # Every process of the engine reports the same fault, and one line of it is enough.
    findings = {
        f.name: f
        for worker in (loaded or [None])
        for f in run_checks(
            rollouts,
            task.sampling,
            cfg.model.vocab_size,
            version,
            encode=partial(encode_prompt, task, tokenizer),
            engine_encode=engine_encode,
            loaded=worker,
        )
    }
    handshake = read_handshake(loaded, cfg.model)
    if describe_engine(cfg).uses_trainer_forward:
        handshake = replace(handshake, dtype=cfg.model.dtype)
    if handshake.config_differences:
        finding = config_finding(handshake.config_differences, cfg.model)
        findings = {finding.name: finding} | findings
    try:
        start_id = tokenizer.special("<|startoftext|>")
    except ConfigError:
        start_id = None
    return explain_gap(
        rollouts,
        params,
        cfg.model,
        task.sampling,
        run=Programs(
            jax.jit(partial(run_trunk, ops=ops), static_argnames="cfg"),
            jax.jit(partial(run_head, ops=ops), static_argnames=("cfg", "top_k", "top_p")),
        ),
        previous=previous,
        start_id=start_id,
        handshake=handshake,
        findings=[*findings.values(), *expert_findings],
        round_engine=round_engine,
    )


def encode_prompt(task: Task, tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Return the ids of a held-out prompt, as this tokenizer encodes its row."""
    return make_prompt(task.held_out, prompt.id, tokenizer, task.template, sys.maxsize).tokens


def write_report(
    report: Report,
    work: Path,
    weights_name: str,
    batch_invariance: BatchInvariance,
    op_comparison: OpComparison | None,
) -> None:
    """Write doctor.json and plots/doctor.png."""
    verdict = report.verdict
    record = {
        "weights": weights_name,
        "agrees": report.agrees,
        "verdict": verdict.kind,
        "faults": [
            {
                "name": f.name,
                "category": f.category,
                "requirement": f.requirement,
                "change": f.fix,
                "value": f.value,
                "spread": f.spread if f.value is not None else None,
            }
            for f in verdict.faults
        ],
        "why": verdict.reason,
        "gap": verdict.gap,
        "left": verdict.remaining,
        "also": verdict.also,
        "rounding": {"own": report.rounding.trainer, "engine": report.rounding.engine},
        "ranked": [
            {"faults": [f.name for f in faults], "left": remaining}
            for faults, remaining in verdict.ranked
        ],
        "findings": [dataclasses.asdict(f) for f in report.findings],
        "metrics": report.metrics,
        "worst": [dataclasses.asdict(t) for t in report.worst],
        "layers": [dataclasses.asdict(x) for x in report.layers],
        "replayed": report.replayed,
        "batch_invariance": batch_invariance._asdict(),
        "op_comparison": None if op_comparison is None else dataclasses.asdict(op_comparison),
    }
    work.mkdir(parents=True, exist_ok=True)
    replace_text(work / "doctor.json", json.dumps(record, indent=2) + "\n")
    print(f"report: {work / 'doctor.json'}")
    if verdict.kind == "not judged":
        return
    plot_path = work / "plots" / "doctor.png"
    layers = [(x.switched, x.switched_replayed) for x in report.layers]
    plot_gap(plot_path, report.engine_N, report.trainer_N, format_verdict(report)[0][:110], layers)
    print(f"plot: {plot_path}")


if __name__ == "__main__":
    sys.exit(main())
