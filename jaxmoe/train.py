# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.train --config FILE`: the command, and the training loop on one page.

    rollouts -> rewards -> step (advantages, corrections, updates) -> weight sync -> eval -> save

The parts are made by jaxmoe/run/parts.py; the step is jaxmoe/rl/update.py; rollouts during a step
are jaxmoe/rollout/async_rollouts.py; logs, timing and checkpoints are jaxmoe/run/job.py. To change
the loop, copy this file.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxmoe.batches.batch import shard_rows
from jaxmoe.batches.engine_experts import check_replayed_experts, unknown_experts_metric
from jaxmoe.batches.sharing_from_config import sharing_from_config
from jaxmoe.checkpoint.base import load_stage_base, own_base_digest, pack_base
from jaxmoe.checkpoint.peft.init_from import load_initial_adapters
from jaxmoe.checkpoint.run import (
    Position,
    initial_params,
    lock_run_folder,
    record_config,
    restore_run,
)
from jaxmoe.cli import ExitStatus, handle_stop_signals, parse_config
from jaxmoe.collection.demonstrations import (
    check_targets,
    make_warm_start_batch,
    warm_start_target,
)
from jaxmoe.collection.reward_checks import print_unmeasured
from jaxmoe.collection.tasks import digest_contents
from jaxmoe.config import Config
from jaxmoe.distributed.processes import exit_process, joined_processes, max_over_processes
from jaxmoe.observe.metrics import MetricsLog, format_accuracy, read_metrics
from jaxmoe.observe.progress import Progress
from jaxmoe.rl.minibatches import pack_batch, sharing_metrics, split_minibatches
from jaxmoe.rl.optimizer import policy_learning_rate
from jaxmoe.rl.state import (
    init_rl_state,
    init_run_adapters,
    init_warmup_state,
    stage_shapes,
)
from jaxmoe.rl.turns import add_turns
from jaxmoe.rl.update import CheckedStep
from jaxmoe.rollout.engine import BaseReader
from jaxmoe.rollout.first_process import GroupSaver
from jaxmoe.rollout.staleness import check_versions
from jaxmoe.run.dry_run import dry_run
from jaxmoe.run.job import Job
from jaxmoe.run.parts import STAGES, Parts, make_parts
from jaxmoe.run.programs import out_shardings_option, warmup_optimizer
from jaxmoe.run.start_codes import StartCodes
from jaxmoe.run.teacher import Teacher
from jaxmoe.shapes import Params


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        cfg, is_dry_run = parse_config(argv, "Train a GPT-OSS by reinforcement learning.")
        if is_dry_run:
            dry_run(cfg, *STAGES)
            return status.code
        with joined_processes():
            train(cfg, make_parts(cfg))
            typed = sys.argv[1:] if argv is None else argv
            out = str(Path(cfg.workdir) / "export")
            print(f"export   python -m jaxmoe.export {shlex.join([*typed, '--out', out])}")
    return exit_process(status.code)


def train(cfg: Config, parts: Parts) -> None:
    """Train in the config's run folder with these parts; a folder with a checkpoint is resumed."""
    with open_job(cfg, parts) as job:
        warm_start(job)
        train_rl(job)


@contextmanager
def open_job(cfg: Config, parts: Parts) -> Iterator[Job]:
    """Open engine and run folder, with the weights at the run's position.

    Everything that cannot work is refused before the folder is created.
    """
    work, task = Path(cfg.workdir), parts.task
    position, base, digests = load_position(cfg, parts)
    teacher = parts.teacher.load() if isinstance(parts.teacher, Teacher) else None
    if teacher is not None and parts.mesh is None:
        # Restored weights are committed to their device, and so is what a step makes of them. If
        # the first state were not, the second step would be compiled again.
        state = jax.device_put(position.state, jax.local_devices()[0])
        position = replace(position, state=state)
    task.check_prompts()
    first = jax.process_index() == 0
    if first:
        for line in task.describe_rows():
            print(f"rows     {line}", flush=True)
        print_unmeasured(task)
    if position.stage == "warmup" and position.step < cfg.warmup.steps:
        check_targets(task, cfg.read_context)
    with (
        closing(parts.open_engine(cfg, parts.engine_ops or parts.ops, work, parts.mesh)) as engine,
        handle_stop_signals() as stop,
        lock_run_folder(work, enabled=first),
        MetricsLog(
            work,
            stage=position.stage,
            step=position.step,
            enabled=first,
            trackers=cfg.observe.trackers,
            project=cfg.observe.project,
            config=asdict(cfg),
        ) as log,
    ):
        if first:
            record_config(work, cfg, parts.kernels.names)
        job = Job(cfg, parts, engine, log, stop, position, contents=digests, base=base)
        job.teacher = teacher
        yield job
    print(f"plots    {work / 'plots' / 'overview.png'}")
    print(f"metrics  {work / 'metrics.jsonl'}")
    print(f"samples  python -m jaxmoe.samples {shlex.quote(str(work))}")
    print(f"{task.score_name} {format_accuracy(read_metrics(work / 'metrics.jsonl'))}")


def load_position(cfg: Config, parts: Parts) -> tuple[Position, Params | None, dict[str, str]]:
    """Return the position of the newest checkpoint, or the first one, with the weights.

    In addition: the base of a LoRA run, once it is at RL; and the digests of the run's files.
    """
    mesh, tx, supervised = parts.mesh, parts.tx, warmup_optimizer(cfg)
    digests, base_digests = digest_contents(cfg, parts.task), own_base_digest(cfg)
    digests |= {} if parts.teacher is None else parts.teacher.digest()
    shapes = stage_shapes(cfg, supervised, tx, mesh)
    position = restore_run(Path(cfg.workdir), cfg, shapes, contents=digests | base_digests)
    if position is None:
        # A wrong adapter is refused before the base is loaded, which takes long.
        load_initial_adapters(cfg)
    base = load_stage_base(cfg, position and position.stage)
    # After a warm start the base is made again, so an older digest would be wrong.
    digests |= base_digests if base is not None else {}
    # RL begins on a given base, so the full weights are never trained and need no state.
    if position is None and base is not None:
        init_rl = jax.jit(partial(init_rl_state, cfg=cfg, tx=tx))
        position = Position("rl", 0, init_rl(init_run_adapters(cfg, base)), None)
    if position is None:
        init_warmup = partial(init_warmup_state, cfg=cfg, tx=supervised)
        policy = initial_params(cfg, mesh)
        if pins := out_shardings_option(cfg, mesh, jax.eval_shape(init_warmup, policy), 0):
            # The moments are made with their final shardings, and never on one device.
            init_warmup = jax.jit(init_warmup, **pins)
        position = Position("warmup", 0, init_warmup(policy), None)
    return position, base, digests


def warm_start(job: Job) -> None:
    """Make supervised steps on the stored answers, so that a random model earns rewards at all."""
    if job.position.stage != "warmup":
        return
    cfg, task, mesh, state = job.cfg, job.parts.task, job.parts.mesh, job.position.state
    w = cfg.warmup
    teacher, weights = job.parts.teacher, ()
    options = {}
    if cfg.distill.warmup_share > 0 and isinstance(teacher, Teacher):
        options, weights = {"teacher": teacher.scorer}, (job.teacher,)
    program = job.parts.supervised_program(cfg, job.ops, mesh, state, **options)
    step_fn = jax.jit(program.fn, **program.options)
    # Another seed than that of RL's prompts, so that the two stages read the rows in different
    # orders.
    data = task.stream(w.sequences_per_step, cfg.seed + 1)
    if job.position.data is not None:
        data.set_state(job.position.data)
    bar = Progress(w.steps, "warmup", step=job.position.step)
    with job.save_on_error(), bar as progress:
        for step in job.remaining_steps(w.steps):
            prompts = next(data)
            targets = [warm_start_target(prompt, task) for prompt in prompts]
            batch = make_warm_start_batch(prompts, targets, task, cfg.read_context)
            # No RL step is behind these weights.
            batch = replace(batch, shared={"step": np.int32(0)})
            batch = pack_batch(batch, cfg.optim.tokens_per_microbatch)
            with job.time_phase("train"):
                state, metrics = step_fn(state, shard_rows(batch, mesh), *weights)
                metrics = job.fetch_metrics(
                    step_fn, metrics, step, rate=("warmup.lr", w.lr), state=state
                )
            job.log.write("warmup", step, metrics | job.times)
            progress.update(step, loss=metrics["loss"])
            job.position = Position("warmup", step, state, data.get_state())
            job.save_or_stop(last=step == w.steps)
    # Jitted, because restored weights are committed to their device. If new moments were not, the
    # second step would compile again.
    init_rl = partial(init_rl_state, cfg=cfg, tx=job.parts.tx)
    policy = state.policy
    if cfg.lora.ranks:
        job.base = pack_base(policy, cfg)
        job.contents |= own_base_digest(cfg)
        policy = init_run_adapters(cfg, job.base)
    pins = out_shardings_option(cfg, mesh, jax.eval_shape(init_rl, policy), 0)
    state = jax.jit(init_rl, **pins)(policy)
    job.start_stage(Position("rl", 0, state, None))


def train_rl(job: Job) -> None:
    """Run the RL loop."""
    cfg, parts, engine, state = job.cfg, job.parts, job.engine, job.position.state
    a = parts.algorithm
    teacher = {"teacher": parts.teacher.scorer} if isinstance(parts.teacher, Teacher) else {}
    program = parts.rl_program(cfg, job.ops, parts.mesh, a, parts.tx, state, **teacher)
    step_fn = CheckedStep(program.fn, program.check, **program.options)
    sharing = sharing_from_config(cfg, parts.ops.attend)
    # With "auto" each batch is shared or not, and each of the two ways has a program.
    programs = 1 if sharing is None or sharing.is_unconditional else 2
    rollouts = parts.open_rollouts(
        cfg,
        parts.task,
        engine,
        job.position.step,
        job.position.data,
        job.position.queue,
        report=job.show_phase,
        stop_signal=lambda: job.stop.signal,
    )
    job.groups = rollouts if isinstance(rollouts, GroupSaver) else None
    # On an error the state is saved first. Closing the rollouts may take a minute.
    with closing(rollouts), job.save_on_error():
        if job.base is not None and isinstance(engine, BaseReader):
            engine.share_base(job.base)
        engine.load(job.policy_params(), job.position.step)
        job.evaluate_at_start()
        start_codes = StartCodes(cfg, state.policy, job.position.step, parts.mesh)
        rollouts.weights_synced(job.position.step)
        with Progress(cfg.steps, "rl", step=job.position.step) as progress:
            job.progress = progress
            for step in job.remaining_steps(cfg.steps):
                collected = rollouts.take_batch(step)
                if collected is None:
                    raise job.stop_after_saving(max_over_processes(job.stop.signal))
                staleness = check_versions(
                    collected.rollouts, newest=step - 1, max_staleness=cfg.rollout.max_staleness
                )
                batch = parts.make_batch(cfg, parts.task, collected.rollouts, collected.rewards)
                batch, scored = job.score_by_server(batch)
                batch, minibatches = split_minibatches(
                    add_turns(batch, collected.rollouts, a, cfg.rollout.max_turns),
                    a,
                    seed=(cfg.seed, step),
                    tokens_per_microbatch=cfg.optim.tokens_per_microbatch,
                    sharing=sharing,
                )
                if cfg.router.replay == "R3":
                    check_replayed_experts(batch)
                # Read before the step, which donates the state.
                n_updates = int(state.step)
                with job.time_phase("train"):
                    batch = replace(batch, shared=batch.shared | {"step": np.int32(step - 1)})
                    placed = shard_rows(batch, parts.mesh)
                    frozen = job.frozen_for_batch(batch)
                    state, metrics, stats = step_fn(state, placed, minibatches, *frozen)
                    metrics = job.fetch_metrics(
                        step_fn,
                        metrics,
                        step,
                        rate=("optim.lr", cfg.optim.lr),
                        state=state,
                        programs=programs,
                    )
                # Before the position moves on, so that a resume samples a refused batch again.
                job.check_gate(state, metrics, step, batch, stats)
                job.position = Position("rl", step, state, collected.data)
                metrics["optim/lr"] = policy_learning_rate(cfg, n_updates)
                metrics |= (
                    scored | collected.metrics | (staleness if cfg.rollout.max_staleness else {})
                )
                metrics |= sharing_metrics(batch, minibatches)
                metrics |= unknown_experts_metric(batch) | start_codes.measure(state.policy)
                with job.log_metrics_on_error(metrics):
                    job.write_sample_groups(step, collected, batch, stats)
                    with job.time_phase("weight_sync"):
                        engine.load(job.policy_params(), step)
                    if job.is_eval_due(step):
                        with rollouts.paused(), job.time_phase("eval"):
                            metrics |= job.evaluate_held_out()
                rollouts.weights_synced(step)
                job.report_step(progress, batch, metrics | rollouts.wait_metrics())
                job.save_or_stop(last=step == cfg.steps)


if __name__ == "__main__":
    sys.exit(main())
