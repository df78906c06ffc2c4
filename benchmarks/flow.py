# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of the schedules of rollouts, where answers and tools have long tails.

COMMAND  python -m benchmarks.flow [--rounds 3] [--steps 8] [--train-s 0.5] [--slow-s 1]

A tiny random model, in the native engine with rows for all answers of a step, speaks 1 to 16 turns
of about 14 tokens: half of the prompts 1, a sixteenth 16. Every fifth reply takes `--slow-s`. A
step of the trainer sleeps `--train-s` and loads weights. The turns and delays belong to a prompt's
number, so they are the same in each schedule; the schedules alternate, after a round that is not
counted, because it compiles. unused: share of the decoded columns of rows that no answer has; a row
that waits while nothing is decoded is not counted.
"""

import argparse
import statistics
import time
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxmoe.config_file import load_config, override
from jaxmoe.model import init_params, make_ops
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from jaxmoe.rollout.async_rollouts import AsyncRollouts
from jaxmoe.rollout.group_flow import GroupFlow, GroupRollouts
from jaxmoe.rollout.group_order import GroupOrder
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.rollout.native_flow import FlowEngine
from jaxmoe.rollout.replies import ReplyThreads

PROMPTS, SAMPLES, CONTEXT, TURN = 8, 4, 512, 32
STOPS = tuple(range(32, 51))  # a random policy of tiny.py's 264 words stops after about 14 tokens
TURNS = (1, 1, 1, 1, 2, 2, 3, 1, 1, 1, 1, 1, 2, 3, 6, 16)  # of prompts, by number
# name, engine, (schedule, max_staleness, max_lag)
SCHEDULES = (
    ("batch", "admission", ("batch", 1, 0)),
    ("batch, two ahead", "admission", ("batch", 2, 0)),
    ("groups admission", "admission", ("groups", 2, 1)),
    ("groups keep", "keep", ("groups", 2, 1)),
    ("groups recompute", "recompute", ("groups", 2, 1)),
)
THREADS = ReplyThreads(256)


class Tools:
    """Replies of four tokens to the episodes of some prompts; some take `slow_s`."""

    reply_timeout_s, patience_s, reply_threads = 0.0, 0.0, THREADS

    def __init__(self, numbers: Sequence[int], slow_s: float) -> None:
        self._numbers, self._slow_s = numbers, slow_s
        self._counts = [0] * (len(numbers) * SAMPLES)

    def reply(self, episode: int, turn: Sequence[int]) -> Sequence[int] | StopReason:
        number = self._numbers[episode // SAMPLES]
        self._counts[episode] += 1
        if self._counts[episode] >= TURNS[number % len(TURNS)]:
            return StopReason.STOP_TOKEN
        if zlib.crc32(f"{number} {episode % SAMPLES} {self._counts[episode]}".encode()) % 5 == 0:
            time.sleep(self._slow_s)
        return [60, 61, 62, 63]


class Sampler:
    """An engine, and counts of what it decodes."""

    def __init__(self, name: str, slow_s: float) -> None:
        cfg = override(load_config("tiny.py"), "model.d_model=64")
        sizes: dict[str, Any] = dict(
            max_prompt_tokens=32, max_new_tokens=CONTEXT // 2, max_rows=PROMPTS * SAMPLES
        )
        sizes |= dict(max_context=CONTEXT, max_reply_tokens=8)
        make: Any = NativeEngine
        if name != "admission":
            make = partial(FlowEngine, recompute=name == "recompute")
        self.engine = make(cfg.model, make_ops(cfg), **sizes)
        self._params, self._slow_s = init_params(jax.random.key(0), cfg.model), slow_s
        self._programs = self.engine._programs
        self.engine._programs = replace(self._programs, decode=self._decode)
        self.decoded = self.sampled = 0

    def load(self, version: int) -> None:
        self.engine.load(self._params, version)

    def _decode(self, *args: Any, **named: Any) -> Any:
        first = int(args[1].column)
        rows = self._programs.decode(*args, **named)
        self.decoded += (int(rows.column) - first) * rows.alive_B.shape[0]
        return rows

    def sample(self, engine: Any, numbers: Sequence[int]) -> list[Rollout]:
        prompts = [Prompt(n, "", (70 + n % 100,) * 20, None) for n in numbers]
        limits: dict[str, Any] = dict(max_turns=99, max_turn_tokens=TURN * 4, max_context=CONTEXT)
        sampling = Sampling(CONTEXT // 2, STOPS, **limits)
        tools = Tools(numbers, self._slow_s)
        rollouts = engine.generate(
            prompts, sampling, seed=numbers[0], samples=SAMPLES, environment=tools
        )
        self.sampled += sum(r.n_sampled for r in rollouts)
        return rollouts


def open_rollouts(sampler: Sampler, schedule: str, staleness: int, lag: int, *, steps: int) -> Any:
    # Nothing is interrupted: each batch and group that was begun is needed.
    options: dict[str, Any] = dict(first=1, last=steps, stop=bool, interrupt=bool)

    def make_batch(step: int) -> list[Rollout]:
        return sampler.sample(sampler.engine, range((step - 1) * PROMPTS, step * PROMPTS))

    if schedule == "batch":
        return AsyncRollouts(make_batch, max_staleness=staleness, **options)
    flow = GroupFlow(
        lambda number: partial(sampler.sample, sampler.engine.pin(), [number]),
        GroupOrder(PROMPTS, lag),
        places=PROMPTS,
        begun=PROMPTS * (1 + isinstance(sampler.engine, FlowEngine)),
        ahead=staleness - lag,
        last=steps,
        step=0,
    )
    return GroupRollouts(
        lambda step: [rollout for group in flow.draw(step)[0].values() for rollout in group],
        flow,
        ahead=staleness - lag,
        save=lambda step: ({}, b""),
        **options,
    )


def time_run(
    sampler: Sampler, schedule: tuple[str, int, int], steps: int, train_s: float
) -> tuple[float, ...]:
    """Return trained tokens a second, the share of unused columns, and that of answers with several
    versions."""
    sampler.load(0)
    sampler.decoded = sampler.sampled = 0
    rollouts, trained, mixed = open_rollouts(sampler, *schedule, steps=steps), 0, list[bool]()
    start_s = time.perf_counter()
    with closing(rollouts):
        rollouts.weights_synced(0)
        for step in range(1, steps + 1):
            batch = rollouts.take_batch(step)
            trained += sum(r.n_sampled for r in batch)
            mixed += [len(np.unique(r.weight_versions)) > 1 for r in batch]
            time.sleep(train_s)
            sampler.load(step)
            rollouts.weights_synced(step)
        elapsed_s = time.perf_counter() - start_s
    unused = 1 - sampler.sampled / sampler.decoded
    return trained / elapsed_s, unused, float(np.mean(mixed))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--train-s", type=float, default=0.5)
    parser.add_argument("--slow-s", type=float, default=1.0)
    args = parser.parse_args()
    samplers = {name: Sampler(engine, args.slow_s) for name, engine, _ in SCHEDULES}
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in samplers}
    for number in range(args.rounds + 1):
        # Alternately forward and backward.
        for name, _, schedule in SCHEDULES[:: -1 if number % 2 else 1]:
            result = time_run(samplers[name], schedule, args.steps, args.train_s)
            results[name] += [result] * (number > 0)
            print(f"round {number}  {name:17} {result[0]:6.0f} tokens/s", flush=True)
    first = statistics.median(rate for rate, *_ in results[SCHEDULES[0][0]])
    for name, values in results.items():
        rates, unused, mixed = zip(*values, strict=True)
        rate = statistics.median(rates)
        print(
            f"{name:17} {rate:6.0f} tokens/s  {rate / first:.2f}x  of {min(rates):.0f} to "
            f"{max(rates):.0f}  unused {statistics.median(unused):.0%}  several versions "
            f"{statistics.median(mixed):.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
