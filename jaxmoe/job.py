# SPDX-License-Identifier: Apache-2.0
"""A run of the train command: what its stages work with, and how it is timed, logged and saved.

Next: jaxmoe/checkpoint/run.py keeps positions; jaxmoe/train.py is the loop.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.checkpoint.store import CheckpointError
from jaxmoe.cli import Stopped, StopRequest
from jaxmoe.config import Config, ConfigError, EngineError
from jaxmoe.envs.recorded import group_rows, held_out_rows
from jaxmoe.envs.rollouts import ScoredRollouts
from jaxmoe.envs.tasks import Task, evaluate
from jaxmoe.guards import check_finite, gate_error, invariance_error
from jaxmoe.model import Ops
from jaxmoe.model.embedding import gather_embedding_rows
from jaxmoe.model.lora import with_adapters
from jaxmoe.observe.alerts import alerts, counted
from jaxmoe.observe.metrics import MetricsLog, read_metrics
from jaxmoe.observe.plots import plot_run
from jaxmoe.observe.profiling import assert_compiled_once
from jaxmoe.observe.progress import Progress, phase
from jaxmoe.parallel.processes import gather_from_processes, gather_to_hosts, max_over_processes
from jaxmoe.reconcile.first_difference import find_first_difference
from jaxmoe.records import Prompt
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import Batch, padding_frac
from jaxmoe.rl.state import TrainState
from jaxmoe.rl.update import TokenStats
from jaxmoe.rollout.engine import Engine
from jaxmoe.run_files import RunFolderError
from jaxmoe.shapes import Metrics, Params


@dataclass
class Job:
    """What both stages work with, and where the run stands."""

    cfg: Config
    ops: Ops
    algorithm: Algorithm
    tx: optax.GradientTransformation  # of RL
    work: Path
    task: Task
    engine: Engine
    log: MetricsLog
    stop: StopRequest
    position: Position  # after the last whole step
    times: Metrics = field(default_factory=dict)  # seconds of this step, by phase
    saved_number: int = field(init=False)  # number of the newest position that needs no saving
    step_start_s: float = 0.0  # of this step
    n_reported_incidents: int = 0  # incidents of the engine that have been logged
    contents: dict[str, str] = field(default_factory=dict)  # digests of the run's files
    progress: Progress | None = None  # the bar that is shown
    mesh: Mesh | None = None  # None: one device
    base: Params | None = None  # the frozen weights of a LoRA run, once it is at RL

    def __post_init__(self) -> None:
        self.saved_number = self.position.number  # it is on disk, or can be made again
        self.first_step = self.position.step
        self.n_reported_incidents = len(self.engine.incidents)

    def policy_params(self) -> Params:
        """The weights after the last whole step, as an engine loads them."""
        found = self.position.state.params.policy
        if self.base is None:
            return found
        return with_adapters(self.base, found, self.cfg.lora.scales)

    def base_for_batch(self, batch: Batch) -> Params | None:
        """The base as a step on this batch takes it."""
        rows = self.cfg.lora.embedding_rows
        if self.base is None or not rows:
            return self.base
        return gather_embedding_rows(self.base, np.asarray(batch.tokens_BT), rows)

    def start_stage(self, at: Position) -> None:
        """Go on from here; it is saved, or can be made again."""
        self.position, self.saved_number, self.first_step = at, at.number, at.step

    def remaining_steps(self, last: int) -> Iterator[int]:
        """The steps of a stage that are left, each with a clock of its own."""
        for step in range(self.position.step + 1, last + 1):
            self.step_start_s, self.times = time.perf_counter(), {}
            yield step

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.show_phase(name.replace("_", " "))
        yield
        spent = time.perf_counter() - start
        self.times[f"time/{name}_s"] = self.times.get(f"time/{name}_s", 0.0) + spent

    def show_phase(self, text: str, done: int = 0, total: int = 0) -> None:
        """`Progress.tell`, where a bar is shown."""
        if self.progress is not None:
            self.progress.tell(text, done, total)

    def fetch_metrics(
        self, step_fn: Any, metrics: Metrics, step: int, *, rate: tuple[str, float]
    ) -> Metrics:
        """Device scalars as Python numbers; waits for the step.

        Raises ConfigError where one is not finite.
        """
        found = {name: float(value) for name, value in jax.device_get(metrics).items()}
        check_finite(found, step, rate=rate)
        assert_compiled_once(step_fn, step - self.first_step)
        return found

    def check_gate(
        self, state: TrainState, metrics: Metrics, step: int, batch: Batch, told: TokenStats
    ) -> None:
        """Raises ConfigError where the gate held the batch back and the run may not skip it."""
        if metrics["gate/closed"] and not self.cfg.step_gate.skip:
            # as before this batch: a resume draws it again
            self.position = replace(self.position, state=state)
            self.save_checkpoint()
            gap = metrics["train_rollout_logprob_abs_diff_max"]
            if self.cfg.requires_equal_logp and gap > 0:
                raise invariance_error(gap, self.describe_first_difference(batch, told), step)
            raise gate_error(self.cfg, metrics, step)

    def describe_first_difference(self, batch: Batch, told: TokenStats) -> str:
        """The first token whose log-prob the engine has otherwise, and what of it differs first."""
        mask_BT, logp_BT = np.asarray(batch.loss_mask_BT), gather_to_hosts(told.logp_BT)
        other_BT = mask_BT & (logp_BT != np.asarray(batch.rollout_logp_BT))
        row = int(np.argmax(other_BT.any(1)))
        column = int(np.argmax(other_BT[row]))
        length = int((np.asarray(batch.segment_ids_BT[row]) > 0).sum())
        tokens = np.asarray(batch.tokens_BT[row][:length])
        prompt = int(np.argmax(mask_BT[row]))
        found = find_first_difference(
            self.policy_params(), tokens, prompt, self.cfg.model, self.ops
        )
        of = f"First in rollout {row}, token {column}: "
        return of + (f"{found}." if found else "alone, its bits are the same; in a batch not.")

    @cached_property
    def held_out(self) -> list[Prompt]:
        return self.task.held_out_prompts()

    def is_eval_due(self, step: int) -> bool:
        """Whether the held-out rows are scored after that step."""
        return step % self.cfg.eval.every_steps == 0 or step == self.cfg.steps

    def evaluate_held_out(self) -> Metrics:
        """Accuracy on the held-out rows; a few answers go to samples.jsonl, others each time."""
        step, task, e = self.position.step, self.task, self.cfg.eval
        metrics, rollouts, rewards = evaluate(
            self.engine,
            self.held_out,
            task,
            version=step,
            samples=e.samples_per_prompt,
            tell=self.show_phase,
        )
        number = -(-step // e.every_steps)
        self.log.write_samples("rl", step, held_out_rows(rollouts, rewards, task, number))
        return metrics

    def write_sample_groups(
        self, step: int, collected: ScoredRollouts, batch: Batch, told: TokenStats
    ) -> None:
        """A few groups of a step go to samples.jsonl, where it is evaluated or saved."""
        if not (self.is_eval_due(step) or step % self.cfg.save.every_steps == 0):
            return
        logp_BT, advantages_BT = (gather_to_hosts(x) for x in (told.logp_BT, told.advantages_BT))
        self.log.write_samples("rl", step, group_rows(
            collected.rollouts, collected.rewards, self.task,
            samples=self.cfg.rollout.samples_per_prompt, mask_BT=np.asarray(batch.loss_mask_BT),
            advantages_BT=advantages_BT, logp_BT=logp_BT,
            rollout_logp_BT=np.asarray(batch.rollout_logp_BT),
        ))  # fmt: skip

    def evaluate_at_start(self) -> None:
        """Score the weights RL starts from; or make up for an evaluation that broke."""
        step = self.position.step
        rows = read_metrics(self.work / "metrics.jsonl")
        told = any(r["step"] == step and "eval/accuracy" in r for r in rows)
        if (
            not self.is_eval_due(step) or gather_from_processes(told)[0]
        ):  # the first process writes the file
            return
        with phase(f"scoring the held-out rows at step {step}"):
            self.log.write("rl", step, self.evaluate_held_out())
        if step:
            self.draw_plots()

    @contextmanager
    def log_metrics_on_error(self, metrics: Metrics) -> Iterator[None]:
        """For what follows an update: the step was made, and a resume goes on behind it."""
        try:
            yield
        except Exception:
            self.log.write("rl", self.position.step, metrics | self.times)
            raise

    def report_step(self, progress: Progress, batch: Batch, metrics: Metrics) -> None:
        """A step's line in metrics.jsonl and on the terminal; its plot where that is due."""
        step, spent = self.position.step, time.perf_counter() - self.step_start_s
        tokens = int(np.asarray(batch.segment_ids_BT).sum())
        metrics |= self.times | {"tokens_per_s": tokens / spent, "time/step_s": spent}
        incidents = self.engine.incidents[self.n_reported_incidents :]
        self.n_reported_incidents += len(incidents)
        metrics["rollout/incidents"] = len(incidents)
        metrics["batch/padding_frac"] = padding_frac(batch)
        raised = alerts(metrics)
        self.log.write("rl", step, metrics, alerts=[*raised.values(), *counted(incidents)])
        progress.alert(step, raised)
        progress.update(
            step, reward=metrics["reward/mean"],
            engine_gap=metrics["train_rollout_logprob_abs_diff"],
            tokens_per_s=metrics["tokens_per_s"],
            **{self.task.score_name: metrics.get("eval/accuracy")},
        )  # fmt: skip
        if self.is_eval_due(step):
            self.draw_plots()

    def draw_plots(self) -> None:
        """All of the run so far; panels of their own at its end."""
        if jax.process_index():
            return
        rows, last = read_metrics(self.work / "metrics.jsonl"), self.position.step == self.cfg.steps
        try:
            plot_run(rows, self.work, panels=last, score=self.task.score_name)
        except RunFolderError as error:  # pictures can be drawn again, from metrics.jsonl
            print(f"! no plots: {error}", file=sys.stderr, flush=True)

    def save_checkpoint(self) -> str:
        """Save the state after the last whole step, unless it is, and say where that stands.

        Raises ConfigError where the run folder is gone: a new one would hold half a run.
        """
        self.log.must_be_in_place()
        if self.position.number > self.saved_number:
            if any(x.is_deleted() for x in jax.tree.leaves(self.position.state)):
                return "The step took the weights with it: go on from the last checkpoint."
            self._write_checkpoint()
            self.saved_number = self.position.number
        if self.position.step == 0:
            stage = self.position.stage
            return f"no {stage} step was made in {self.work}; the same command begins it."
        where = f"saved {self.position.stage} step {self.position.step} in {self.work}"
        return f"{where}; the same command resumes."

    def _write_checkpoint(self) -> None:
        """Write a checkpoint, and try again once: the first try's clean-up may have made room."""
        try:
            save_run(self.work, self.cfg, self.position, self.contents)
        except CheckpointError as error:
            if jax.process_count() > 1:  # the others may have written theirs
                raise
            print(f"! {error} Saving once more.", file=sys.stderr, flush=True)
            save_run(self.work, self.cfg, self.position, self.contents)

    def save_or_stop(self, *, last: bool) -> None:
        """Save when due or asked to stop; leave with a message where asked."""
        self.log.must_be_in_place()
        if self.position.step % self.cfg.save.every_steps == 0 or last:
            self.save_checkpoint()
        asked = max_over_processes(
            self.stop.signal
        )  # a process that no signal reached must stop as well
        if asked and not (last and self.position.stage == "rl"):
            raise self.stop_after_saving(asked)

    def stop_after_saving(self, asked: int) -> Stopped:
        """Save, and return what to leave with where that signal asked the run to stop."""
        return Stopped(asked, self.save_checkpoint())

    @contextmanager
    def save_on_error(self) -> Iterator[None]:
        """But not where a save needs processes that may be gone."""
        if jax.process_count() > 1:
            yield
            return
        try:
            yield
        except CheckpointError:
            raise  # it was this that could not be saved
        except EngineError as error:
            raise type(error)(f"{error} {self.save_checkpoint()}") from error
        except ConfigError as error:  # the same command would stop at the same place
            saved = self.save_checkpoint().replace(
                "; the same command ", "; with that mended, the command "
            )
            raise type(error)(f"{error} {saved}") from error
        except Exception as error:  # of a reward, say: its traceback is shown, its run is kept
            error.add_note(self.save_checkpoint())
            raise
