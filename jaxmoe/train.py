# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.train --config FILE`: the command, and THE loop on one page.

    rollouts -> rewards -> step (advantages, corrections, updates) -> publish -> measure -> save

The step is jaxmoe/rl/update.py; rollouts made while it runs are
jaxmoe/rollout/async_rollouts.py. To change the loop, copy this file.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe import plan
from jaxmoe.checkpoint.run import (
    Position,
    alone,
    initial_params,
    record_config,
    restore_run,
    save_run,
)
from jaxmoe.cli import Stopped, StopRequest, command, stop_requests
from jaxmoe.config import Config, ConfigError, EngineError
from jaxmoe.engines import open_engine
from jaxmoe.envs.rollouts import collect_rollouts
from jaxmoe.envs.tasks import Task, answer_tokens, evaluate, open_task, response_text
from jaxmoe.guards import gate_closed, must_be_finite
from jaxmoe.losses import overlong_penalty
from jaxmoe.observe.alerts import alerts
from jaxmoe.observe.metrics import MetricsLog, read_metrics
from jaxmoe.observe.plots import plot_run
from jaxmoe.observe.profiling import assert_compiled_once
from jaxmoe.observe.progress import Progress, phase
from jaxmoe.records import Prompt, Rollout
from jaxmoe.rl.algorithm import Algorithm, algorithm
from jaxmoe.rl.batch import Batch, rollout_batch, supervised_batch
from jaxmoe.rl.minibatches import divide, packed
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import TrainState, new_state, policy_of, stage_shapes, with_critic
from jaxmoe.rl.step import supervised_loss_fn, train_step
from jaxmoe.rl.update import Scorer, rl_step
from jaxmoe.rollout.async_rollouts import AsyncRollouts, SyncRollouts
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.staleness import check_versions
from jaxmoe.shapes import Metrics


def main(argv: list[str] | None = None) -> int:
    def go(cfg: Config, dry_run: bool) -> None:
        print(plan.describe(cfg)) if dry_run else run(cfg)

    return command(argv, "Train a GPT-OSS by reinforcement learning.", go)


def run(cfg: Config) -> None:
    """Warm start, then RL; the same run folder goes on where its last checkpoint stands."""
    work = Path(cfg.workdir)
    one_device(cfg)
    chosen = algorithm(cfg)
    task = open_task(cfg)
    supervised = make_optimizer(cfg.optim, steps=cfg.warmup.steps, lr=cfg.warmup.lr)
    tx = rl_optimizer(cfg)
    at = restore_run(work, cfg, stage_shapes(cfg, supervised, tx))
    if at is None:
        at = Position("warmup", 0, new_state(initial_params(cfg), supervised), None, None)
    task.check_prompts()  # before there is a run folder
    if at.stage == "warmup" and at.step < cfg.warmup.steps:
        task.check_answers(cfg.context)
    first = jax.process_index() == 0
    with (
        closing(open_engine(cfg, work)) as engine,
        stop_requests() as stop,
        alone(work, enabled=first),
        MetricsLog(work, stage=at.stage, step=at.step, enabled=first) as log,
    ):
        if first:
            record_config(work, cfg)
        desk = Desk(cfg, work, task, engine, log, stop)
        if at.stage == "warmup":
            state = warm_start(desk, at, supervised)
            # jitted: restored weights are tied to their device, and the fresh moments must be
            # too, or the first step's program would not fit the second's arguments
            first_state = jax.jit(lambda policy: new_state(with_critic(policy, cfg), tx))
            at = Position("rl", 0, first_state(state.params), None, None)
        reinforce(desk, at, tx, chosen)
    print(f"plots    {work / 'plots' / 'overview.png'}")
    print(f"metrics  {work / 'metrics.jsonl'}")


def one_device(cfg: Config) -> None:
    """Refuse a mesh: parameters are not cut over devices yet."""
    if cfg.mesh.fsdp * cfg.mesh.expert != 1:
        raise ConfigError(
            f"mesh.fsdp * mesh.expert must be 1, got {cfg.mesh.fsdp} * {cfg.mesh.expert}: this "
            "version trains on one device. Try --dry-run, or --set mesh.fsdp=1 "
            "--set mesh.expert=1."
        )


@dataclass
class Desk:
    """What both stages work with."""

    cfg: Config
    work: Path
    task: Task
    engine: Engine
    log: MetricsLog
    stop: StopRequest
    phases: dict[str, float] = field(default_factory=dict)
    at: Position = field(init=False)  # after the last whole step
    saved: int = field(init=False)  # number of the newest position that needs no saving

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.phases[f"time/{name}_s"] = self.phases.get(f"time/{name}_s", 0.0) + spent

    def begin(self, at: Position) -> None:
        """Go on from here; it is saved, or can be made again."""
        self.at, self.saved = at, at.number

    def save(self) -> str:
        """Save the state after the last whole step, unless it is, and say where that stands."""
        if self.at.number > self.saved:
            if any(x.is_deleted() for x in jax.tree.leaves(self.at.state)):
                return "The step took the weights with it: go on from the last checkpoint."
            save_run(self.work, self.cfg, self.at)
            self.saved = self.at.number
        if self.at.step == 0:
            return f"no {self.at.stage} step was made in {self.work}; the same command begins it."
        where = f"saved {self.at.stage} step {self.at.step} in {self.work}"
        return f"{where}; the same command resumes."

    def save_or_stop(self, *, last: bool) -> None:
        """Save when due or asked to stop; leave with a message where asked."""
        if self.at.step % self.cfg.save.every_steps == 0 or last:
            self.save()
        if self.stop.signal and not (last and self.at.stage == "rl"):
            raise self.stopped()

    def stopped(self) -> Stopped:
        """What to leave with where the run was asked to stop: it is saved."""
        return Stopped(self.stop.signal, self.save())

    @contextmanager
    def saved_if_it_cannot_go_on(self) -> Iterator[None]:
        try:
            yield
        except (EngineError, ConfigError) as error:
            raise type(error)(f"{error} {self.save()}") from error
        except Exception as error:  # of a reward, say: its traceback is shown, its run is kept
            error.add_note(self.save())
            raise


def warm_start(desk: Desk, at: Position, tx: optax.GradientTransformation) -> TrainState:
    """Supervised steps on the stored answers: a random model has nothing for RL to amplify."""
    cfg, task, state = desk.cfg, desk.task, at.state
    w = cfg.warmup
    loss_fn = partial(supervised_loss_fn, model=cfg.model, remat=cfg.optim.remat)
    step_fn = jax.jit(
        partial(train_step, tx=tx, loss_fn=loss_fn, microbatches=cfg.optim.microbatches),
        donate_argnums=0,
    )
    desk.begin(at)
    data = task.stream(w.sequences_per_step, cfg.seed + 1)
    if at.data is not None:
        data.set_state(at.data)
    bar = Progress(w.steps, "warmup", done=at.step)
    with desk.saved_if_it_cannot_go_on(), bar as progress:
        for step in range(at.step + 1, w.steps + 1):
            prompts, desk.phases = next(data), {}
            answers = [answer_tokens(p, task) for p in prompts]
            batch = supervised_batch(
                prompts, answers, length=cfg.context, pad_id=task.tokenizer.pad_id
            )
            batch = packed(batch, cfg.optim.tokens_per_microbatch)
            with desk.clock("train"):
                state, metrics = step_fn(state, batch)
                metrics = host(metrics)
            must_be_finite(metrics, step, rate=("warmup.lr", w.lr))
            assert_compiled_once(step_fn, step - at.step)
            desk.log.write("warmup", step, metrics | desk.phases)
            progress.update(step, loss=metrics["loss"])
            desk.at = Position("warmup", step, state, None, data.get_state())
            desk.save_or_stop(last=step == w.steps)
    return state


def reinforce(
    desk: Desk, at: Position, tx: optax.GradientTransformation, a: Algorithm
) -> TrainState:
    """RL: the loop."""
    cfg, task, engine, state = desk.cfg, desk.task, desk.engine, at.state
    r = cfg.rollout
    scorer = Scorer(cfg.model, r.temperature, cfg.optim.remat, cfg.critic.backbone)
    step_fn = jax.jit(
        partial(
            rl_step, tx=tx, algorithm=a, scorer=scorer, gate=cfg.gate,
            microbatches=cfg.optim.microbatches,
        ),
        donate_argnums=0,
    )  # fmt: skip
    reference = at.reference
    if a.kl_coef > 0 and reference is None:
        reference = jax.tree.map(lambda x: x.copy(), policy_of(state.params))
    desk.begin(replace(at, reference=reference))
    held_out = task.held_out_prompts()
    data = task.stream(r.prompts_per_step, cfg.seed + 2)
    if at.data is not None:
        data.set_state(at.data)
    make = partial(collect_rollouts, cfg, task, engine, data)
    batches = SyncRollouts(make) if r.max_staleness == 0 else AsyncRollouts(
        make, first=at.step + 1, last=cfg.steps, max_staleness=r.max_staleness,
        stop=lambda: desk.stop.signal, interrupt=engine.close,
    )  # fmt: skip
    told = len(engine.incidents)
    with closing(batches), desk.saved_if_it_cannot_go_on():
        engine.load(policy_of(state.params), at.step)
        if due(cfg, at.step) and not measured(desk.work, at.step):  # the first; or one that broke
            with phase(f"scoring the held-out rows at step {at.step}"):
                desk.log.write("rl", at.step, measure(desk, held_out))
            if at.step:
                plot(desk, at.step)
        batches.weights_synced(at.step)
        with Progress(cfg.steps, "rl", done=at.step) as progress:
            for step in range(at.step + 1, cfg.steps + 1):
                start, desk.phases = time.perf_counter(), {}
                drawn = batches.take(step)
                if drawn is None:
                    raise desk.stopped()
                ages = check_versions(
                    drawn.rollouts, newest=step - 1, max_staleness=r.max_staleness
                )
                batch, minibatches = divide(
                    make_batch(cfg, task, drawn.rollouts, drawn.rewards), a,
                    seed=(cfg.seed, step), tokens_per_microbatch=cfg.optim.tokens_per_microbatch,
                )  # fmt: skip
                with desk.clock("train"):
                    state, metrics = step_fn(state, batch, minibatches, reference)
                    metrics = host(metrics)
                    must_be_finite(metrics, step, rate=("optim.lr", cfg.optim.lr))
                    assert_compiled_once(step_fn, step - at.step)
                if metrics["gate/closed"] and not cfg.gate.skip:
                    # as before this batch: a resume draws it again
                    desk.at = replace(desk.at, state=state)
                    desk.save()
                    raise gate_closed(cfg, metrics, step)
                desk.at = Position("rl", step, state, reference, drawn.data)
                metrics |= drawn.metrics | (ages if r.max_staleness else {})
                try:
                    with desk.clock("weight_sync"):
                        engine.load(policy_of(state.params), step)
                    if due(cfg, step):
                        with batches.paused(), desk.clock("eval"):
                            metrics |= measure(desk, held_out)
                except Exception:  # the step was made: a resume goes on behind it
                    desk.log.write("rl", step, metrics | desk.phases)
                    raise
                batches.weights_synced(step)
                tokens = int(np.asarray(batch.segment_ids_BT).sum())
                elapsed = time.perf_counter() - start
                metrics |= desk.phases | batches.waits()
                metrics |= {"tokens_per_s": tokens / elapsed, "time/step_s": elapsed}
                mended = engine.incidents[told:]
                told += len(mended)
                metrics["rollout/incidents"] = len(mended)
                raised = alerts(metrics)
                desk.log.write("rl", step, metrics, alerts=[*raised.values(), *mended])
                progress.alert(step, raised)
                progress.update(
                    step, reward=metrics["reward/mean"], kl=metrics["policy/kl_rollout"],
                    tokens_per_s=metrics["tokens_per_s"], accuracy=metrics.get("eval/accuracy"),
                )  # fmt: skip
                if due(cfg, step):
                    plot(desk, step)
                desk.save_or_stop(last=step == cfg.steps)
    return state


def make_batch(cfg: Config, task: Task, rollouts: list[Rollout], rewards: np.ndarray) -> Batch:
    """The step's arrays, the samples of a prompt side by side; too long answers pay for it."""
    r = cfg.rollout
    if r.overlong_buffer:
        lengths = np.array([len(rollout.tokens) for rollout in rollouts])
        penalty = overlong_penalty(
            jnp.asarray(lengths), longest=r.max_new_tokens, buffer=r.overlong_buffer
        )
        rewards = rewards + np.asarray(penalty)
    return rollout_batch(
        rollouts, rewards, samples=r.samples_per_prompt, length=cfg.context,
        pad_id=task.tokenizer.pad_id,
    )  # fmt: skip


def measure(desk: Desk, prompts: list[Prompt]) -> Metrics:
    """Accuracy on the held-out rows; a few answers go to samples.jsonl."""
    step = desk.at.step
    metrics, rollouts, rewards = evaluate(desk.engine, prompts, desk.task, version=step)
    rows = [
        {"prompt": r.prompt.text, "response": response_text(r, desk.task),
         "answer": r.prompt.answer, "reward": float(reward), "stop": str(r.stop)}
        for r, reward in list(zip(rollouts, rewards, strict=True))[:8]
    ]  # fmt: skip
    desk.log.write_samples("rl", step, rows)
    return metrics


def due(cfg: Config, step: int) -> bool:
    """Whether the held-out rows are scored after that step."""
    return step % cfg.eval.every_steps == 0 or step == cfg.steps


def measured(work: Path, step: int) -> bool:
    """Whether they have been."""
    rows = read_metrics(work / "metrics.jsonl")
    return any(row["step"] == step and "eval/accuracy" in row for row in rows)


def plot(desk: Desk, step: int) -> None:
    """All of the run so far; panels of their own at its end."""
    plot_run(read_metrics(desk.work / "metrics.jsonl"), desk.work, panels=step == desk.cfg.steps)


def host(metrics: Metrics) -> Metrics:
    """Device scalars as Python numbers; waits for the step."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


if __name__ == "__main__":
    sys.exit(main())
