# SPDX-License-Identifier: Apache-2.0
"""A run in progress: its position, and its timing, logs and checkpoints.

Next: jaxmoe/checkpoint/run.py stores positions; jaxmoe/train.py is the loop.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.batches.batch import Batch, padding_frac
from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.checkpoint.store import CheckpointError
from jaxmoe.cli import Stopped, StopRequest
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.recorded import group_rows, held_out_rows
from jaxmoe.collection.rollouts import ScoredRollouts
from jaxmoe.config import Config, ConfigError, EngineError
from jaxmoe.distributed.processes import gather_from_processes, gather_to_hosts, max_over_processes
from jaxmoe.model import Ops
from jaxmoe.model.embedding import gather_embedding_rows
from jaxmoe.observe.alerts import (
    collapse_repeats,
    count_bad_steps,
    count_logged_bad_steps,
    find_alerts,
)
from jaxmoe.observe.metrics import MetricsLog, read_metrics
from jaxmoe.observe.profiling import assert_compiled_once
from jaxmoe.observe.progress import Progress, report_phase
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.records import Prompt
from jaxmoe.rl.metrics.router_metrics import LAYER_PREFIX
from jaxmoe.rl.state import TrainState
from jaxmoe.rl.update import TokenStats
from jaxmoe.rollout.engine import Engine, Pinnable, SyncReporter
from jaxmoe.rollout.first_process import GroupSaver
from jaxmoe.run.engine_weights import make_engine_reader
from jaxmoe.run.guards import check_finite, gate_error, invariance_error
from jaxmoe.run.parts import Parts
from jaxmoe.run.plots import draw_plots
from jaxmoe.shapes import Metrics, Params
from jaxmoe.vllm.client.teacher import TeacherServer


@dataclass
class Job:
    """A run in progress, in the folder cfg.workdir."""

    cfg: Config
    parts: Parts
    engine: Engine
    log: MetricsLog
    stop: StopRequest
    position: Position  # after the last complete step
    times: Metrics = field(default_factory=dict)  # seconds of this step, by phase
    saved_number: int = field(init=False)  # number of the newest position that needs no saving
    step_start_s: float = 0.0  # clock at the start of this step
    n_reported_incidents: int = 0  # number of the engine's incidents that are logged
    bad_steps: dict[str, int] = field(init=False)  # steps in a row, by metric
    contents: dict[str, str] = field(default_factory=dict)  # digests of the run's files
    layer_metrics: dict[str, list[float]] = field(default_factory=dict)  # of the last step
    progress: Progress | None = None  # the progress bar on the terminal
    base: Params | None = None  # the frozen weights of a LoRA run, once it is at RL
    teacher: Params | None = None  # the weights of a second model
    groups: GroupSaver | None = None  # with rollout.schedule=groups

    def __post_init__(self) -> None:
        self.start_stage(self.position)
        self.n_reported_incidents = len(self.engine.incidents)
        self.bad_steps = count_logged_bad_steps(read_metrics(self.work / "metrics.jsonl"))

    @property
    def work(self) -> Path:
        return Path(self.cfg.workdir)

    @cached_property
    def ops(self) -> Ops:
        """The ops of the run's mesh."""
        parts, mesh_cfg = self.parts, self.cfg.mesh
        return sharded_ops(parts.ops, parts.mesh, self.cfg.model, method=mesh_cfg.attention)

    @cached_property
    def read_weights(self) -> Callable[[Params | None, Params], Params]:
        """The function from the base and the trained weights to those that an engine loads."""
        return make_engine_reader(self.cfg, self.parts.mesh)

    def policy_params(self) -> Params:
        """Return the weights after the last complete step, as an engine loads them."""
        return self.read_weights(self.base, self.position.state.policy)

    def frozen_for_batch(self, batch: Batch) -> tuple[Params | None, ...]:
        """Return the base, with the embedding rows of this batch, and a teacher if there is one."""
        rows, base = self.cfg.lora.embedding_rows, self.base
        if base is not None and rows:
            base = gather_embedding_rows(base, np.asarray(batch.tokens_BT), rows)
        return (base,) if self.teacher is None else (base, self.teacher)

    def score_by_server(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with the log-probs of a teacher behind a URL, if there is one."""
        if not isinstance(self.parts.teacher, TeacherServer):
            return batch, {}
        with self.time_phase("teacher"):
            return self.parts.teacher.score_batch(batch)

    def start_stage(self, position: Position) -> None:
        """Set the first position of a stage, which is saved or reproducible."""
        self.position, self.first_step = position, position.step
        self.saved_number = position.checkpoint_number

    def remaining_steps(self, last: int) -> Iterator[int]:
        """Yield the remaining steps of a stage, and restart the clock for each."""
        for step in range(self.position.step + 1, last + 1):
            self.step_start_s, self.times = time.perf_counter(), {}
            yield step

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.show_phase(name.replace("_", " "))
        yield
        elapsed_s = time.perf_counter() - start
        self.times[f"time/{name}_s"] = self.times.get(f"time/{name}_s", 0.0) + elapsed_s

    def show_phase(self, text: str, n_done: int = 0, total: int = 0) -> None:
        """Show a phase and its progress in the progress bar, if there is one."""
        if self.progress is not None:
            self.progress.report(text, n_done, total)

    def fetch_metrics(
        self,
        step_fn: Any,
        metrics: Metrics,
        step: int,
        *,
        rate: tuple[str, float],
        state: TrainState,
        programs: int = 1,
    ) -> Metrics:
        """Wait for the step, and return its metrics as Python numbers.

        Those by layer are put into `layer_metrics`. Raises ConfigError if one is not finite, or an
        expert that is rounded. `state` is that after the step, which has up to `programs` programs.
        """
        # One transfer for all metrics. It also waits for the step, so that an error on the device
        # is raised in its own step.
        fetched = jax.device_get(metrics)
        values = {name: float(value) for name, value in fetched.items() if np.ndim(value) == 0}
        layers = {name: value for name, value in fetched.items() if np.ndim(value)}
        check_finite(values | layers, step, rate=rate, cfg=self.cfg, policy=state.policy)
        self.layer_metrics = {
            name.removeprefix(LAYER_PREFIX): value.tolist() for name, value in layers.items()
        }
        assert_compiled_once(step_fn, step - self.first_step, programs)
        return values

    def check_gate(
        self, state: TrainState, metrics: Metrics, step: int, batch: Batch, stats: TokenStats
    ) -> None:
        """Raise ConfigError if the gate rejected the batch and the run may not skip it."""
        if metrics["gate/closed"] and not self.cfg.step_gate.skip:
            # The position is the one before this batch, so a resume samples the batch again.
            self.position = replace(self.position, state=state)
            if self.groups is not None:
                self.groups.discard_drawn()
            self.save_checkpoint()
            gap = metrics["train_rollout_logprob_abs_diff_max"]
            if self.cfg.requires_equal_logp and gap > 0:
                params, logp_BT = self.policy_params(), gather_to_hosts(stats.logp_BT)
                raise invariance_error(gap, params, batch, logp_BT, step, self.cfg.model, self.ops)
            raise gate_error(self.cfg, metrics, step)

    @cached_property
    def held_out(self) -> list[Prompt]:
        return self.parts.task.held_out_prompts()

    def is_eval_due(self, step: int) -> bool:
        """True if the held-out rows are scored after this step."""
        return step % self.cfg.eval.every_steps == 0 or step == self.cfg.steps

    def evaluate_held_out(self) -> Metrics:
        """Return accuracy on the held-out rows; write a few answers to samples.jsonl.

        Each evaluation writes other rows.
        """
        step, task, e = self.position.step, self.parts.task, self.cfg.eval
        metrics, rollouts, rewards = evaluate_held_out(
            self.engine,
            self.held_out,
            task,
            version=step,
            samples=e.samples_per_prompt,
            report=self.show_phase,
        )
        number = -(-step // e.every_steps)
        self.log.write_samples("rl", step, held_out_rows(rollouts, rewards, task, number))
        return metrics

    def write_sample_groups(
        self, step: int, collected: ScoredRollouts, batch: Batch, stats: TokenStats
    ) -> None:
        """Write a few groups to samples.jsonl, in steps with an evaluation or a checkpoint."""
        if not (self.is_eval_due(step) or step % self.cfg.save.every_steps == 0):
            return
        logp_BT, advantages_BT = (gather_to_hosts(x) for x in (stats.logp_BT, stats.advantages_BT))
        rows = group_rows(
            collected.rollouts,
            collected.rewards,
            self.parts.task,
            samples=self.cfg.rollout.samples_per_prompt,
            mask_BT=np.asarray(batch.loss_mask_BT),
            advantages_BT=advantages_BT,
            logp_BT=logp_BT,
            rollout_logp_BT=np.asarray(batch.rollout_logp_BT),
        )
        self.log.write_samples("rl", step, rows)

    def evaluate_at_start(self) -> None:
        """Score the weights at the start of RL, or repeat an evaluation that failed."""
        step = self.position.step
        rows = read_metrics(self.work / "metrics.jsonl")
        # Only the first process writes the file, so its answer counts below.
        is_logged = any(r["step"] == step and "eval/accuracy" in r for r in rows)
        if not self.is_eval_due(step) or gather_from_processes(is_logged)[0]:
            return
        with report_phase(f"scoring the held-out rows at step {step}"):
            self.log.write("rl", step, self.evaluate_held_out())
        if step:
            draw_plots(self.cfg, self.parts, step)

    @contextmanager
    def log_metrics_on_error(self, metrics: Metrics) -> Iterator[None]:
        """Context for the work after an update: on an error, log the metrics of the step.

        The update is done, so a resume continues with the next step.
        """
        try:
            yield
        except Exception:
            self.log.write("rl", self.position.step, metrics | self.times)
            self.log.write_layers("rl", self.position.step, self.layer_metrics)
            raise

    def report_step(self, progress: Progress, batch: Batch, metrics: Metrics) -> None:
        """Write the metrics of a step to metrics.jsonl and the terminal; draw plots if due."""
        step, elapsed_s = self.position.step, time.perf_counter() - self.step_start_s
        tokens = int((np.asarray(batch.segment_ids_BT) > 0).sum())
        metrics |= self.times | {"tokens_per_s": tokens / elapsed_s, "time/step_s": elapsed_s}
        incidents = self.engine.incidents[self.n_reported_incidents :]
        self.n_reported_incidents += len(incidents)
        metrics["rollout/incidents"] = len(incidents)
        if isinstance(self.engine, SyncReporter) and self.engine.sent_frac is not None:
            metrics["rollout/sent_frac"] = self.engine.sent_frac
        metrics["batch/padding_frac"] = padding_frac(batch)
        self.bad_steps = count_bad_steps(metrics, self.bad_steps)
        step_alerts = find_alerts(metrics, self.bad_steps)
        alerts = [*step_alerts.values(), *collapse_repeats(incidents)]
        self.log.write("rl", step, metrics, alerts=alerts)
        self.log.write_layers("rl", step, self.layer_metrics)
        progress.alert(step, step_alerts)
        progress.update(
            step,
            reward=metrics["reward/mean"],
            engine_gap=metrics["train_rollout_logprob_abs_diff"],
            tokens_per_s=metrics["tokens_per_s"],
            **{self.parts.task.score_name: metrics.get("eval/accuracy")},
        )
        if self.is_eval_due(step):
            draw_plots(self.cfg, self.parts, step)

    def save_checkpoint(self) -> str:
        """Save the state after the last complete step, if it is not saved; return a message.

        Raises ConfigError if the run folder was removed, since a new one would be incomplete.
        """
        self.log.check_in_place()
        if self.position.checkpoint_number > self.saved_number:
            # A step donates the state, so the arrays of a step that failed may be gone.
            if any(x.is_deleted() for x in jax.tree.leaves(self.position.state)):
                return "The failed step deleted the weights: resume from the last checkpoint."
            self._write_checkpoint()
            self.saved_number = self.position.checkpoint_number
        stage, step = self.position.stage, self.position.step
        if step == 0:
            return f"no {stage} step was made in {self.work}; the same command begins it."
        return f"saved {stage} step {step} in {self.work}; the same command resumes."

    def _write_checkpoint(self) -> None:
        """Write a checkpoint, and retry once, since the cleanup may have freed disk space."""
        position = self.position
        if self.groups is not None:
            data, queue = self.groups.save(position.step)
            position = replace(position, data=data, queue=queue)
        try:
            save_run(self.work, self.cfg, position, self.contents)
        except CheckpointError as error:
            # Other processes may have written their part already.
            if jax.process_count() > 1:
                raise
            print(f"! {error} Retrying once.", file=sys.stderr, flush=True)
            save_run(self.work, self.cfg, position, self.contents)

    def save_or_stop(self, *, last: bool) -> None:
        """Save a checkpoint if it is due; raise Stopped, after saving, if a stop was requested."""
        self.log.check_in_place()
        if self.position.step % self.cfg.save.every_steps == 0 or last:
            # Answers of older weights could not be repeated after a resume. Answers whose weights
            # change, and those of other engines, are not repeated in any case.
            pins = isinstance(self.engine, Pinnable) and not self.cfg.rollout.changes_in_flight
            if self.groups is not None and pins:
                self.groups.settle(self.position.step)
            self.save_checkpoint()
        # A checkpoint needs all processes, so those without the signal must stop too.
        stop_signal = max_over_processes(self.stop.signal)
        # After the last step the run ends by itself, and as a success.
        if stop_signal and not (last and self.position.stage == "rl"):
            raise self.stop_after_saving(stop_signal)

    def stop_after_saving(self, stop_signal: int) -> Stopped:
        """Save, and return the exception that ends the run after this signal."""
        return Stopped(stop_signal, self.save_checkpoint())

    @contextmanager
    def save_on_error(self) -> Iterator[None]:
        """Context that saves a checkpoint on an error, unless there are several processes.

        With several, a checkpoint needs all of them, and some may have failed.
        """
        if jax.process_count() > 1:
            yield
            return
        try:
            yield
        except CheckpointError:
            raise  # saving failed, so do not save again
        except EngineError as error:
            raise type(error)(f"{error} {self.save_checkpoint()}") from error
        # The same command would fail again in the same step.
        except ConfigError as error:
            message = self.save_checkpoint()
            saved = message.replace("; the same command ", "; after the fix, the command ")
            raise type(error)(f"{error} {saved}") from error
        # This may be a user's reward, so its traceback is kept.
        except Exception as error:
            error.add_note(self.save_checkpoint())
            raise
