# SPDX-License-Identifier: Apache-2.0
"""Runs of tiny_tool.py that are small enough for tests, and a tool that counts its calls."""

import fcntl
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxmoe import train
from jaxmoe.collection import tasks
from jaxmoe.data.rows import Message
from jaxmoe.observe.metrics import read_metrics
from tests.jaxmoe.commands import arguments, start

MODULE = "tests.jaxmoe.tool_runs"
# A few steps of the warm start are enough: every demonstration is the same.
SMALL = {
    "model.d_model": 32,
    "model.d_expert": 24,
    "model.n_experts": 4,
    "data.train_rows": 64,
    "data.held_out_rows": 4,
    "data.rewards": f"{MODULE}:share_of_digits",
    "data.reward_timeout_s": 0,
    "data.max_prompt_tokens": 104,
    "warmup.steps": 24,
    "warmup.lr": 1e-2,
    "warmup.sequences_per_step": 16,
    "warmup.demonstrations": f"{MODULE}:demonstrate_call",
    "rollout.sequences_per_step": 16,
    "rollout.samples_per_prompt": 4,
    "rollout.max_context": 192,
    "rollout.max_new_tokens": 72,
    "rollout.max_turn_tokens": 40,
    "rollout.max_reply_tokens": 32,
    "rollout.reply_timeout_s": 600,
    "optim.tokens_per_microbatch": 0,
    "steps": 2,
    "eval.every_steps": 2,
    "save.every_steps": 1,
}
N_ROLLOUTS = SMALL["rollout.sequences_per_step"]
# Numbers of a clock differ between two runs.
CLOCK = ("time/", "tokens_per_s")


def demonstrate_call(row):
    """One call, its reply, and an answer."""
    return [
        Message("assistant", "1+1", channel="analysis", recipient="python"),
        Message("tool", "2", name="python", recipient="assistant", channel="analysis"),
        Message("assistant", "2", channel="final"),
    ]


def share_of_digits(prompt, response, row):
    """A reward that differs between the samples of a row, as much as their texts do."""
    return sum(letter.isdigit() for letter in response) / max(1, len(response))


def python(code: str, folder: str, seconds: float, late_every: int, block_at: int) -> str:
    """Return 2.

    Args:
        code: Anything.
        folder: The folder with the list of calls, a line each.
        seconds: The time that a call takes.
        late_every: Only every n-th call takes that time; 0: all of them.
        block_at: The call of this number does not return before there is a file "released".
    """
    with open(Path(folder) / "calls.txt", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print(os.getpid(), file=file, flush=True)
        file.seek(0)
        number = len(file.readlines())
    if number == block_at:
        (Path(folder) / "blocked").touch()
        while not (Path(folder) / "released").exists():
            time.sleep(0.01)
    if seconds and (not late_every or number % late_every == 0):
        time.sleep(seconds)
    return "2"


def counted_tool(folder, **options):
    """The setting of data.tools for `python` above."""
    # An option that is not set would be a parameter that the policy chooses.
    defaults = {"folder": str(folder), "seconds": 0.0, "late_every": 0, "block_at": 0}
    texts = [f"{name}={value!r}" for name, value in (defaults | options).items()]
    return f"{MODULE}:python({', '.join(texts)})"


def settings(**changes):
    """SMALL with changes, as "key=value"; `a__b` is the key a.b."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in (SMALL | changes).items()]


@dataclass
class ToolRun:
    """A run in a process of its own, whose rollouts are noted in `notes`."""

    work: Path
    process: subprocess.Popen
    notes: Path

    def finish(self, timeout_s=1200):
        """Wait for its end; return its exit status and what it wrote."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out + err

    @cached_property
    def sampled(self):
        """What each call for rollouts returned."""
        return pickle.loads(self.notes.read_bytes())

    @property
    def steps(self):
        return [row for row in read_rows(self.work) if row["stage"] == "rl" and row["step"]]

    @property
    def batches(self):
        """The rollouts of each step: an evaluation has another number of rows."""
        return [rollouts for rollouts in self.sampled if len(rollouts) == N_ROLLOUTS]


def start_tools(work, *, devices=1, environ=None, name="notes", module=MODULE, **changes):
    """Start a run; `environ` are further environment variables.

    module: the command; a module that calls `main` below, or jaxmoe.train, which notes nothing.
    """
    notes = work.parent / f"{work.name}-{name}.pickle"
    words = [] if module == "jaxmoe.train" else [str(notes)]
    words += arguments(work, *settings(**changes), config="tiny_tool.py")
    typed = [sys.executable, "-W", "error", "-m", module, *words]
    process = start(typed, JAX_NUM_CPU_DEVICES=str(devices), **environ or {})
    return ToolRun(work, process, notes)


def run_tools(work, **options):
    """Return a run that has ended well."""
    run = start_tools(work, **options)
    code, output = run.finish()
    assert code == 0, output
    return run


def main():
    """Train as the command does, and note all rollouts in the file of the first argument."""
    notes, sampled, lock = Path(sys.argv[1]), [], threading.Lock()
    sample_rollouts = tasks.sample_rollouts

    def sample_and_note(*args, **named):
        rollouts = sample_rollouts(*args, **named)
        with lock:  # groups are sampled in threads
            sampled.append(rollouts)
            notes.write_bytes(pickle.dumps(sampled))
        return rollouts

    tasks.sample_rollouts = sample_and_note
    return train.main(sys.argv[2:])


def read_rows(work):
    """Lines of metrics without the numbers of a clock."""
    rows = read_metrics(work / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows]


def check_steps(run, *, is_on_policy=True):
    """Assert that tools were called, and that trainer and engine agree about what was sampled."""
    assert len(run.steps) == len(run.batches) == 2
    for row, rollouts in zip(run.steps, run.batches, strict=True):
        assert row["train_rollout_logprob_abs_diff_max"] <= 1e-5
        assert row["tool/calls"] > 0.5 and row["turns/mean"] > 1.2 and row["grad/norm"] > 0
        assert {"tool/errors", "tool/unknown", "tool/used_frac", "hack/forged_turn"} <= row.keys()
        # The metrics of lengths count what was sampled, and not what the tool replied.
        lengths = [r.n_sampled for r in rollouts]
        assert row["response_len/max"] == max(lengths) < row["episode_len/max"]
        np.testing.assert_allclose(row["response_len/mean"], np.mean(lengths), rtol=1e-6)
    if is_on_policy:
        assert run.steps[0]["policy/ratio_mean"] == run.steps[0]["policy/ratio_max"] == 1.0


if __name__ == "__main__":
    sys.exit(main())
