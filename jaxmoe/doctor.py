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
import numpy as np

from jaxmoe.checkpoint.run import initial_params, restore_run
from jaxmoe.cli import ExitStatus, parse
from jaxmoe.config import Config, ConfigError, EngineError, require
from jaxmoe.data.pipeline import make_prompt
from jaxmoe.data.tokenizer import Tokenizer, load_tokenizer
from jaxmoe.dry_run import dry_run
from jaxmoe.engines import open_engine
from jaxmoe.envs.tasks import Task, contents, open_task
from jaxmoe.kernels import kernels_here
from jaxmoe.memory import check_memory, scoring_stage
from jaxmoe.model import Ops, make_ops
from jaxmoe.observe.gap_plot import plot_gap
from jaxmoe.observe.printable import printable
from jaxmoe.observe.progress import phase
from jaxmoe.reconcile.checks import run_checks
from jaxmoe.reconcile.company import Company, company
from jaxmoe.reconcile.compare import Report, reconcile
from jaxmoe.reconcile.handshake import config_finding, shake
from jaxmoe.reconcile.ladder import (
    Ladder,
    Steps,
    differences,
    ladder,
    places,
    with_differences,
)
from jaxmoe.reconcile.printed import show, show_company, show_ladder, verdict_lines
from jaxmoe.reconcile.recompute import Programs, head, trunk
from jaxmoe.records import Prompt, Rollout
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import stage_shapes
from jaxmoe.rollout.engine import Engine
from jaxmoe.run_files import replace_text
from jaxmoe.shapes import Params

PROMPTS, SAMPLES = 32, 2  # held-out prompts, answers to each
SEQUENCES = 4  # that are read piece by piece
UNBOUNDED = 1e9  # of the engine's own probe: the doctor wants to see what it would refuse


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        cfg, looks = parse(argv, "Compare the engine with the trainer, and explain the gap.")
        if looks:
            dry_run(cfg, scoring_stage(cfg))
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
    check_memory(cfg, scoring_stage(cfg))
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
            again = engine.generate(prompts[:1], task.sampling, seed=3, samples=SAMPLES)
        loaded = loaded_states(engine, cfg)
        recorded = recordings(engine, rollouts, cfg)
    with phase("recomputing"):
        report = examine(cfg, task, rollouts, params, before, version, loaded, ops)
    show(report, rollouts, task.tokenizer.decode, where)
    among = company(rollouts[:SAMPLES], again)
    show_company(among)
    pieces = None
    if recorded is not None and report.agrees:
        with phase("one piece of the model after the other"):
            steps = differences, with_differences
            run_them = Steps(*(jax.jit(partial(f, cfg=cfg.model, ops=ops)) for f in steps))
            pieces = ladder(params, *recorded, run_them)
        show_ladder(pieces)
    write(report, work, where, among, pieces)
    return report.agrees


def not_loaded(error: EngineError, work: Path, where: str) -> bool:
    """The engine did not come to hold the weights: the error names the tensors, or what broke."""
    print(f"DISAGREE: the engine does not hold {where}. {printable(str(error))}")
    work.mkdir(parents=True, exist_ok=True)
    record = {"weights": where, "agrees": False, "verdict": "refused", "why": str(error)}
    replace_text(work / "doctor.json", json.dumps(record, indent=2) + "\n")
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


def recordings(
    engine: Engine, rollouts: Sequence[Rollout], cfg: Config
) -> tuple[np.ndarray, list[dict[str, np.ndarray]]] | None:
    """A few sequences, cut to one length, and what vLLM's modules gave for them.

    Where vLLM is one worker in this process; None elsewhere.
    """
    if cfg.rollout.engine != "vllm":
        return None
    from jaxmoe.vllm.backend import RequestFailed  # runs without its packages otherwise
    from jaxmoe.vllm.engine import VllmEngine
    from jaxmoe.vllm.in_process_backend import InProcessBackend
    from jaxmoe.vllm.request import score_tokens

    assert isinstance(engine, VllmEngine)
    backend = engine.backends[0]
    if not isinstance(backend, InProcessBackend):
        print("pieces   are compared where vLLM is in this process: --set rollout.vllm.launch=0")
        return None
    chosen = [[*r.prompt.tokens, *r.tokens.tolist()] for r in rollouts[::SAMPLES][:SEQUENCES]]
    tokens_BT = np.array([row[: min(map(len, chosen))] for row in chosen], np.int32)
    told = []
    for row in tokens_BT.tolist():
        try:
            (logp, _), workers = backend.record_forward(
                partial(score_tokens, backend, row, cfg.model)
            )
        except RequestFailed as error:  # modules of another name, say: the verdict stands without
            print(f"pieces   not compared: {printable(str(error))}")
            return None
        if len(workers) > 1:  # each has a part of every tensor
            return None
        told.append(places(workers[0], logp, cfg.model))
    return tokens_BT, told


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


def write(report: Report, work: Path, where: str, among: Company, pieces: Ladder | None) -> None:
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
        "company": among._asdict(),
        "pieces": None if pieces is None else dataclasses.asdict(pieces),
    }  # fmt: skip
    work.mkdir(parents=True, exist_ok=True)
    replace_text(work / "doctor.json", json.dumps(record, indent=2) + "\n")
    print(f"report   {work / 'doctor.json'}")
    if v.kind == "not judged":
        return
    picture = work / "plots" / "doctor.png"
    layers = [(x.switched, x.switched_here) for x in report.layers]
    plot_gap(picture, report.engine_N, report.trainer_N, verdict_lines(report)[0][:110], layers)
    print(f"plot     {picture}")


if __name__ == "__main__":
    sys.exit(main())
