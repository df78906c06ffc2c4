# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.train --config FILE`: the command, and the training loop on one page.

    rollouts -> rewards -> step (advantages, corrections, updates) -> weight sync -> eval -> save

The step is jaxmoe/rl/update.py; rollouts during a step are jaxmoe/rollout/async_rollouts.py; logs,
timing and checkpoints are jaxmoe/job.py. To change the loop, copy this file.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint.base import load_base, own_base_digest, pack_base
from jaxmoe.checkpoint.run import (
    Position,
    code_version,
    initial_params,
    lock_run_folder,
    record_config,
    restore_run,
)
from jaxmoe.cli import ExitStatus, handle_stop_signals, parse_config
from jaxmoe.config import Config, to_json
from jaxmoe.dry_run import dry_run
from jaxmoe.envs.rollouts import collect_rollouts
from jaxmoe.envs.tasks import Task, answer_tokens, digest_contents, open_task
from jaxmoe.job import Job
from jaxmoe.kernels import choose_run_kernels
from jaxmoe.losses import overlong_penalty
from jaxmoe.memory import check_memory
from jaxmoe.model import make_ops
from jaxmoe.model.trainable import count_trained
from jaxmoe.observe.metrics import MetricsLog, format_accuracy, read_metrics
from jaxmoe.observe.progress import Progress
from jaxmoe.observe.trackers import check_installed
from jaxmoe.parallel.check_collectives import check_collectives
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.processes import check_same_everywhere, exit_process, joined_processes
from jaxmoe.parallel.sharding import make_mesh, shard_batch
from jaxmoe.records import Rollout
from jaxmoe.rl.batch import Batch, rollout_batch, supervised_batch
from jaxmoe.rl.dynamic_sampling import impute_rewards
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import pack_batch, split_minibatches
from jaxmoe.rl.optimizer import policy_learning_rate, rl_optimizer
from jaxmoe.rl.programs import (
    out_shardings_option,
    rl_program,
    supervised_program,
    warmup_optimizer,
)
from jaxmoe.rl.source_digests import source_digests
from jaxmoe.rl.state import (
    init_rl_state,
    init_run_adapters,
    init_warmup_state,
    stage_shapes,
)
from jaxmoe.rollout.async_rollouts import AsyncRollouts, SyncRollouts
from jaxmoe.rollout.engine import BaseReader, open_engine
from jaxmoe.rollout.recorded_experts import unknown_experts_metric
from jaxmoe.rollout.staleness import check_versions

STAGES = ("training", "sampling", "syncing")  # stages of the memory check


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        cfg, is_dry_run = parse_config(argv, "Train a GPT-OSS by reinforcement learning.")
        if is_dry_run:
            dry_run(cfg, *STAGES)
            return status.code
        with joined_processes():
            with open_job(cfg) as job:
                warm_start(job)
                train_rl(job)
            typed = sys.argv[1:] if argv is None else argv
            out = str(Path(cfg.workdir) / "export")
            print(f"export   python -m jaxmoe.export {shlex.join([*typed, '--out', out])}")
    return exit_process(status.code)


@contextmanager
def open_job(cfg: Config) -> Iterator[Job]:
    """Open task, engine and run folder; a folder with a checkpoint is resumed.

    Everything that cannot work is refused before the folder is created.
    """
    work = Path(cfg.workdir)
    n_trained, n_params = count_trained(cfg)
    sources = json.dumps(source_digests(cfg), indent=1)
    check_same_everywhere(config=to_json(cfg), code=code_version(), sources=sources)
    kernels = choose_run_kernels(cfg)  # before this process opens the device
    ops = make_ops(cfg, kernels.impls)
    check_mesh(cfg, jax.device_count())
    check_memory(cfg, *STAGES)
    mesh = make_mesh(cfg.mesh)
    check_collectives(mesh)
    kernels.print_decision()
    print(f"trains   {n_trained:,} of {n_params:,} parameters", flush=True)
    if (n_devices := jax.device_count()) > cfg.mesh.devices:
        used = f"using {cfg.mesh.devices} of {n_devices} devices"
        print(f"devices  {used}; use all with --set mesh.fsdp={n_devices}", flush=True)
    check_installed(cfg.observe.trackers)
    algorithm, task, tx = algorithm_from_config(cfg), open_task(cfg), rl_optimizer(cfg)
    supervised = warmup_optimizer(cfg)
    digests = digest_contents(cfg, task)
    shapes, base_digests = stage_shapes(cfg, supervised, tx, mesh), own_base_digest(cfg)
    position = restore_run(work, cfg, shapes, contents=digests | base_digests)
    has_given_base = cfg.lora.ranks and cfg.init.checkpoint and cfg.warmup.steps == 0
    at_rl = has_given_base if position is None else position.stage == "rl"
    base = load_base(cfg) if cfg.lora.ranks and at_rl else None
    digests |= base_digests if at_rl else {}  # the base after a warm start is made again
    if position is None and base is not None:  # RL from a given base: no full trained weights
        init_rl = jax.jit(partial(init_rl_state, cfg=cfg, tx=tx))
        position = Position("rl", 0, init_rl(init_run_adapters(cfg, base)), None)
    if position is None:
        init_warmup = partial(init_warmup_state, cfg=cfg, tx=supervised)
        policy = initial_params(cfg, mesh)
        if pins := out_shardings_option(cfg, mesh, jax.eval_shape(init_warmup, policy), 0):
            init_warmup = jax.jit(
                init_warmup, **pins
            )  # moments are made with their final shardings
        position = Position("warmup", 0, init_warmup(policy), None)
    task.check_prompts()
    if task.overlong is not None and jax.process_index() == 0:
        print(f"rows     {task.overlong}", flush=True)
    if position.stage == "warmup" and position.step < cfg.warmup.steps:
        task.check_answers(cfg.context)
    first = jax.process_index() == 0
    with (
        closing(open_engine(cfg, ops, work, mesh)) as engine,
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
            record_config(work, cfg, kernels.names)
        ops = sharded_ops(ops, mesh, cfg.model, method=cfg.mesh.attention)
        yield Job(
            cfg, ops, algorithm, tx, work, task, engine, log, stop, position, contents=digests,
            mesh=mesh, base=base,
        )  # fmt: skip
    print(f"plots    {work / 'plots' / 'overview.png'}")
    print(f"metrics  {work / 'metrics.jsonl'}")
    print(f"samples  python -m jaxmoe.samples {shlex.quote(str(work))}")
    print(f"{task.score_name} {format_accuracy(read_metrics(work / 'metrics.jsonl'))}")


def warm_start(job: Job) -> None:
    """Make supervised steps on the stored answers, so that a random model earns rewards at all."""
    if job.position.stage != "warmup":
        return
    cfg, task, state = job.cfg, job.task, job.position.state
    w = cfg.warmup
    program = supervised_program(cfg, job.ops, job.mesh, state)
    step_fn = jax.jit(program.fn, **program.options)
    data = task.stream(w.sequences_per_step, cfg.seed + 1)
    if job.position.data is not None:
        data.set_state(job.position.data)
    bar = Progress(w.steps, "warmup", step=job.position.step)
    with job.save_on_error(), bar as progress:
        for step in job.remaining_steps(w.steps):
            prompts = next(data)
            answers = [answer_tokens(p, task) for p in prompts]
            batch = supervised_batch(
                prompts, answers, length=cfg.context, pad_id=task.tokenizer.pad_id
            )
            batch = pack_batch(batch, cfg.optim.tokens_per_microbatch)
            with job.time_phase("train"):
                state, metrics = step_fn(state, shard_batch(batch, job.mesh))
                metrics = job.fetch_metrics(step_fn, metrics, step, rate=("warmup.lr", w.lr))
            job.log.write("warmup", step, metrics | job.times)
            progress.update(step, loss=metrics["loss"])
            job.position = Position("warmup", step, state, data.get_state())
            job.save_or_stop(last=step == w.steps)
    # Jitted, because restored weights are committed to their device. If new moments were not, the
    # second step would compile again.
    init_rl = partial(init_rl_state, cfg=cfg, tx=job.tx)
    policy = state.policy
    if cfg.lora.ranks:
        job.base = pack_base(policy, cfg)
        job.contents |= own_base_digest(cfg)
        policy = init_run_adapters(cfg, job.base)
    pins = out_shardings_option(cfg, job.mesh, jax.eval_shape(init_rl, policy), 0)
    state = jax.jit(init_rl, **pins)(policy)
    job.start_stage(Position("rl", 0, state, None))


def train_rl(job: Job) -> None:
    """Run the RL loop."""
    cfg, engine, state, a = job.cfg, job.engine, job.position.state, job.algorithm
    program = rl_program(cfg, job.ops, job.mesh, a, job.tx, state)
    step_fn = jax.jit(program.fn, **program.options)
    with closing(open_rollouts(job)) as rollouts, job.save_on_error():
        if job.base is not None and isinstance(engine, BaseReader):
            engine.share_base(job.base)
        engine.load(job.policy_params(), job.position.step)
        job.evaluate_at_start()
        rollouts.weights_synced(job.position.step)
        with Progress(cfg.steps, "rl", step=job.position.step) as progress:
            job.progress = progress
            for step in job.remaining_steps(cfg.steps):
                collected = rollouts.take_batch(step)
                if collected is None:
                    raise job.stop_after_saving(job.stop.signal)
                staleness = check_versions(
                    collected.rollouts, newest=step - 1, max_staleness=cfg.rollout.max_staleness
                )
                batch, minibatches = split_minibatches(
                    make_batch(cfg, job.task, collected.rollouts, collected.rewards), a,
                    seed=(cfg.seed, step), tokens_per_microbatch=cfg.optim.tokens_per_microbatch,
                )  # fmt: skip
                with job.time_phase("train"):
                    placed = shard_batch(batch, job.mesh)
                    state, metrics, stats = step_fn(
                        state, placed, minibatches, job.base_for_batch(batch)
                    )
                    metrics = job.fetch_metrics(
                        step_fn, metrics, step, rate=("optim.lr", cfg.optim.lr)
                    )
                job.check_gate(state, metrics, step, batch, stats)
                job.position = Position("rl", step, state, collected.data)
                metrics["optim/lr"] = policy_learning_rate(cfg, step)
                metrics |= collected.metrics | (staleness if cfg.rollout.max_staleness else {})
                if cfg.rollout.overlong_buffer:
                    paid = apply_overlong_penalty(cfg, collected.rollouts, collected.rewards)
                    metrics["reward/after_penalty_mean"] = float(np.nanmean(paid))
                if batch.routed_experts_BTLA is not None:
                    metrics |= unknown_experts_metric(collected.rollouts)
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


def open_rollouts(job: Job) -> SyncRollouts | AsyncRollouts:
    """Return the source of rollouts: in sync with the training, or ahead of it in a thread."""
    cfg, position = job.cfg, job.position
    data = job.task.stream(cfg.rollout.prompts_per_step, cfg.seed + 2)
    if position.data is not None:
        data.set_state(position.data)
    make = partial(collect_rollouts, cfg, job.task, job.engine, data, report=job.show_phase)
    if cfg.rollout.max_staleness == 0:
        return SyncRollouts(make)
    return AsyncRollouts(
        make, first=position.step + 1, last=cfg.steps, max_staleness=cfg.rollout.max_staleness,
        stop=lambda: job.stop.signal, interrupt=job.engine.close,
    )  # fmt: skip


def apply_overlong_penalty(cfg: Config, rollouts: list[Rollout], rewards: np.ndarray) -> np.ndarray:
    """Return the rewards minus the penalty of overlong answers."""
    r = cfg.rollout
    if not r.overlong_buffer:
        return rewards
    lengths = jnp.asarray([len(rollout.tokens) for rollout in rollouts])
    penalty = overlong_penalty(lengths, max_tokens=r.max_new_tokens, buffer=r.overlong_buffer)
    return rewards + np.asarray(penalty)


def make_batch(cfg: Config, task: Task, rollouts: list[Rollout], rewards: np.ndarray) -> Batch:
    """Return the batch of a step, with the penalty of overlong answers.

    A sample without a reward (NaN) does not change its group's mean, and its tokens are masked.
    """
    r = cfg.rollout
    rewards = apply_overlong_penalty(cfg, rollouts, rewards)
    batch = rollout_batch(
        rollouts, impute_rewards(rewards, r.samples_per_prompt), samples=r.samples_per_prompt,
        length=cfg.context, pad_id=task.tokenizer.pad_id,
        n_experts=cfg.model.n_experts if cfg.records_experts else None,
    )  # fmt: skip
    if np.isnan(rewards).any():
        mask_BT = np.asarray(batch.loss_mask_BT) & ~np.isnan(rewards)[:, None]
        batch = replace(batch, loss_mask_BT=mask_BT)
    return batch


if __name__ == "__main__":
    sys.exit(main())
