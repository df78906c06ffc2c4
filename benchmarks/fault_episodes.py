# SPDX-License-Identifier: Apache-2.0
"""Batches of episodes with a tool in a sandbox and a reward function in its process, in which one
thing breaks at random: an environment, a reward function or its process, or a sandbox.

An answer that the fault did not touch must have the reward that it earns. One that it did must have
none, or, if its sandbox broke, be counted. Next: fault_parts.py is what breaks.
"""

import contextlib
import io
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fault_process import meet_in_process

SOON_S = 120.0
QUESTIONS = tuple(f"{a}*{b}" for a in range(2, 7) for b in range(3, 7))
PROMPTS, SAMPLES = 4, 2
SETTINGS = (
    "data.options={}",
    "data.train_rows=16",
    "data.held_out_rows=4",
    "data.tools=python_sandbox",
    "data.environment=benchmarks.fault_parts:Environment",
    "data.rewards=benchmarks.fault_parts:score",
    "data.reward_timeout_s=5",
    "data.swapped_share=0.5",
    "rollout.reply_timeout_s=15",
    "sandbox.call_s=5",
    "sandbox.warm=2",
    "rollout.sequences_per_step=8",
    "rollout.samples_per_prompt=2",
    "warmup.steps=0",
    "data.max_prompt_tokens=200",
    "rollout.max_context=2000",
    "rollout.max_new_tokens=400",
    "rollout.max_turn_tokens=0",
)
KINDS = ("environment", "reward", "sandbox")


def meet(kinds: list[str], dice: random.Random) -> list[dict]:
    """Meet these faults in one process, or in more where one hangs or dies."""
    return meet_in_process(__file__, kinds, dice, SOON_S)


class Bed:
    """A task, an engine that calls the tool and answers with what it reads, and a plan."""

    def __init__(self, folder: Path) -> None:
        from benchmarks import fault_parts
        from jaxmoe.collection.tasks import open_task
        from jaxmoe.config_file import load_config, override

        self.plan, rows = folder / "plan.json", folder / "rows.jsonl"
        os.environ[fault_parts.PLAN_VARIABLE] = str(self.plan)
        self.plan.write_text("{}")
        lines = [json.dumps({"question": q, "answer": str(eval(q))}) for q in QUESTIONS]
        rows.write_text("\n".join(lines) + "\n")
        self.cfg = override(load_config("tiny_tool.py"), f"data.task={rows}", *SETTINGS)
        self.task = open_task(self.cfg)

    def run(self, numbers: list[int], seed: int) -> tuple[list[Any], Any]:
        """The rollouts of some rows, and their scores, as a step of a run has them."""
        from jaxmoe.collection.lost_episodes import report_lost
        from jaxmoe.collection.reward_checks import plan_checks, score_and_check
        from jaxmoe.collection.scores import print_fault
        from jaxmoe.rewards.rewards import check_faulty

        prompts = [self.task.make_prompt(self.task.train, n) for n in numbers]
        engine = CallingEngine(self.task)
        rollouts = self.task.sample(engine, prompts, self.task.sampling, seed=seed, samples=SAMPLES)
        report_lost(rollouts, self.task.train, 1.0)
        checked = plan_checks(rollouts, self.task.train, self.task, samples=SAMPLES)
        scores = score_and_check(checked, self.task.train, self.task, step=1, count_errors=True)
        check_faulty(scores, 1.0)
        print_fault(scores)
        return rollouts, scores

    def close(self) -> None:
        self.task.run_rewards.close()


class CallingEngine:
    """Runs the row's question by the tool, and answers with what the tool replied."""

    incidents = ()

    def __init__(self, task) -> None:
        self._task = task

    def load(self, params, version):
        raise AssertionError("it has no weights")

    def close(self):
        pass

    def generate(self, prompts, sampling, *, seed, samples=1, environment=None):
        import numpy as np

        from jaxmoe.data.harmony.render import write_turn
        from jaxmoe.data.rows import Message
        from jaxmoe.rollout.replies import PendingReplies
        from jaxmoe.rollout.turns import Episode

        assert environment is not None
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        episodes = [Episode(prompt, sampling, sampling.max_context) for prompt in repeated]
        pending, tokenizer = PendingReplies(environment), self._task.tokenizer

        def speak(i, turn):
            ids = np.array(write_turn(turn, tokenizer), np.int32)
            episodes[i].add_turn(ids, np.full(len(ids), -6.0), np.zeros(len(ids)))
            if episodes[i].stop is None:
                pending.submit(i, ids.tolist())

        for i, prompt in enumerate(repeated):
            question = self._task.train[prompt.id].question
            call = Message("assistant", question, channel="analysis", recipient="python")
            speak(i, [call])
        while len(pending):
            for i, reply in pending.wait(environment.patience_s).items():
                if episodes[i].add_reply(reply):
                    text = tokenizer.decode(episodes[i].context.tolist())
                    number = text.split("<|message|>")[-1].split("<|")[0].strip()
                    speak(i, [Message("assistant", number, channel="final")])
        return [episode.make_rollout() for episode in episodes]


def meet_one(bed: Bed, kind: str, dice: random.Random) -> tuple[str, str]:
    """(failure, what) of one fault; "" if nothing went wrong by it."""
    from benchmarks import fault_parts
    from tests.jaxmoe.sandbox_runs import find_sandboxes

    numbers = dice.sample(range(len(bed.task.train)), PROMPTS)
    questions = [bed.task.train[n].question for n in numbers]
    broken, plan = dice.sample(questions, dice.randrange(1, PROMPTS)), {}
    ended, what, thread, times = threading.Event(), "", None, 0
    if kind == "environment":
        faults = ["result", *fault_parts.COMMON]
        plan = {q: [dice.choice(("reset", "step", "close")), dice.choice(faults)] for q in broken}
        what = str(plan)
    elif kind == "reward" and dice.random() < 0.6:
        faults = ["result", *fault_parts.COMMON, *fault_parts.PROCESS]
        # of one row: a function that is late or ends its process three times in a row is given up
        plan = {broken[0]: ["reward", dice.choice(faults)]}
        what = str(plan)
    else:
        number = dice.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGTERM))
        times, wait_s = dice.randrange(1, 4), dice.uniform(0.0, 0.3)
        what = f"{number.name}, {times} times every {wait_s:.2f} s"

        def send() -> None:
            for _ in range(times):
                if ended.wait(wait_s):
                    return
                find = find_sandboxes if kind == "sandbox" else find_rewards
                if pids := find(os.getpid()):
                    send_signal(dice.choice(sorted(pids)), number, find)

        thread = threading.Thread(target=send)
        thread.start()
    bed.plan.write_text(json.dumps(plan))
    try:
        rollouts, scores = bed.run(numbers, dice.randrange(2**31))
    finally:
        ended.set()
        if thread is not None:
            thread.join()
        if kind == "sandbox":  # one that waits, stopped, would be a fault of the next batch
            for pid in find_sandboxes(os.getpid()):
                send_signal(pid, signal.SIGKILL, find_sandboxes)
        bed.plan.write_text("{}")
    return judge(bed.task.train, kind, plan, times, rollouts, scores), what


def judge(rows: Any, kind: str, plan: dict, n_signals: int, rollouts: list, scores: Any) -> str:
    """ "lost" for a reward that is missing without a fault, or is there in spite of one."""
    from benchmarks import fault_parts

    touched = list[str]()
    for rollout, reward in zip(rollouts, scores.rewards, strict=True):
        where, fault = plan.get(rows[rollout.prompt.id].question, ["", ""])
        right = math.isclose(reward, 1.0 + fault_parts.PAID)
        told = f"{where} {fault} {reward} {rollout.lost!r} {rollout.env_fault!r}"
        if plan:
            # what a function prints spoils nothing
            untouched = fault in ("", "binary")
            if not (right if untouched else math.isnan(reward)):
                return f"lost: {told} {scores.first_fault}"
            continue
        touched += [] if right else [f"{told} {dict(rollout.env_metrics)}"]
        # a program may end its sandbox, so the policy reads that it ended, and may answer wrong
        broke = {"tool/sandbox_crashes", "tool/sandbox_timeouts"} & {
            name for name, value in rollout.env_metrics.items() if value
        }
        counted = kind == "sandbox" and broke and math.isclose(reward, fault_parts.PAID)
        if not (right or math.isnan(reward) or counted):
            return f"lost: {told} {rollout.env_metrics}"
    return f"lost: {n_signals} signals broke {touched}" if len(touched) > n_signals else ""


def send_signal(pid: int, number: signal.Signals, find: Callable[[int], set[int]]) -> None:
    """Signal a process if `find` still finds it: another one may have got its id."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if pid in find(os.getpid()):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def find_rewards(trainer: int) -> set[int]:
    """Process ids of the reward processes that a process started."""
    found = set[int]()
    for task in Path(f"/proc/{trainer}/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                if b"reward_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


def main() -> None:
    """One line of JSON for each "kind seed"."""
    from jaxmoe.config import ConfigError, EngineError

    answers = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory() as folder:
        bed = Bed(Path(folder))
        for line in sys.stdin:
            kind, seed = line.split()
            failure, what, begun, said = "", "", time.monotonic(), io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    failure, what = meet_one(bed, kind, random.Random(int(seed)))
            except (ConfigError, EngineError) as error:
                failure = "other" if len(str(error)) > 2000 else ""
                what = f"{type(error).__name__}: {error}"[:2000]
            except BaseException:
                failure, what = "traceback", traceback.format_exc()[-3000:]
            if "Traceback" in said.getvalue():
                failure, what = "traceback", said.getvalue()[-3000:]
            name, _, reason = failure.partition(": ")
            told = f"{kind} of seed {seed}, {time.monotonic() - begun:.1f} s: {reason} {what}"
            print(json.dumps({"failure": name, "what": told}), file=answers, flush=True)
        bed.close()


if __name__ == "__main__":
    main()
