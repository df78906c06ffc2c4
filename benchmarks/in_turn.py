# SPDX-License-Identifier: Apache-2.0
"""Sides of a comparison, timed in turn in one process: steps of RL and waves of the native engine.

A side is a function that runs once, compiled and warm. On several cores XLA starts threads for
operations that are shorter than the start, so CPU-seconds measure the work only on one core:
`taskset -c 0 python`. step_time.py, quant_speed.py and lora_speed.py have the sides.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxmoe.batches.batch import Batch
from jaxmoe.config import Config
from jaxmoe.model import make_ops
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, init_state
from jaxmoe.rl.update import jit_step
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.shapes import Metrics, Params


def measure_in_turn(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Return the times [rounds, 2] of each side: CPU-seconds of all threads, and seconds."""
    times = np.array([[time_run(run) for run in sides.values()] for _ in range(rounds)])
    return dict(zip(sides, times.transpose(1, 0, 2), strict=True))


def time_run(run: Callable[[], Any]) -> tuple[float, float]:
    cpu, start = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - start


def take_medians(times: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the median CPU-seconds and seconds of each side."""
    return {side: np.median(rounds, axis=0) for side, rounds in times.items()}


def print_times(what: str, medians: Mapping[str, np.ndarray]) -> None:
    for side, (cpu, seconds) in medians.items():
        print(f"| {what}, {side} | {cpu:.3f} CPU-s | {seconds:.3f} s |")


def make_step(
    cfg: Config,
    params: Params,
    scorer: Scorer,
    *,
    base: Params | None = None,
    frozen: Frozen | None = None,
) -> Callable[[], Metrics]:
    """Return a step of RL on a drawn batch, which trains `params` further at each call."""
    tx = rl_optimizer(cfg)
    step = jit_step(
        tx=tx, algorithm=algorithm_from_config(cfg), scorer=scorer, gate=cfg.gate, donate_argnums=0
    )
    state, batch = init_state(Trained(params), tx, frozen), draw_batch(cfg)

    def run() -> Metrics:
        nonlocal state
        state, metrics, _ = step(state, batch, None, base)
        return jax.block_until_ready((state, metrics))[1]

    for _ in range(3):
        run()
    return run


def draw_batch(cfg: Config) -> Batch:
    dice, shape = np.random.default_rng(0), (cfg.rollout.sequences_per_step, cfg.context)
    mask = np.arange(shape[1])[None] >= cfg.data.max_prompt_tokens
    return Batch(
        tokens_BT=dice.integers(0, cfg.model.vocab_size, shape).astype(np.int32),
        positions_BT=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        segment_ids_BT=np.ones(shape, np.int32),
        loss_mask_BT=np.broadcast_to(mask, shape),
        rollout_logp_BT=np.where(mask, -5.5 + 0.3 * dice.normal(size=shape), 0).astype(np.float32),
        rewards_B=dice.random(shape[0]).astype(np.float32),
        samples_per_prompt=cfg.rollout.samples_per_prompt,
    )


def draw_groups(cfg: Config) -> Batch:
    """A batch of full lengths in which the samples of a prompt have its tokens."""
    batch, samples = draw_batch(cfg), cfg.rollout.samples_per_prompt
    tokens, prompt = np.array(batch.tokens_BT), cfg.data.max_prompt_tokens
    tokens[:, :prompt] = np.repeat(tokens[::samples, :prompt], samples, axis=0)
    return replace(batch, tokens_BT=tokens)


def make_decoding(cfg: Config, params: Params) -> Callable[[], Any]:
    """Return a wave of the native engine over these weights: 64 answers that end nowhere."""
    engine = NativeEngine(
        cfg.model, make_ops(cfg), max_prompt_tokens=16, max_new_tokens=64, max_rows=64
    )
    engine.load(params, 0)
    prompts = [Prompt(i, "", tuple(range(i, i + 8)), None) for i in range(8)]
    sampling = Sampling(max_new_tokens=64, stop_ids=())
    run = partial(engine.generate, prompts, sampling, seed=1, samples=8)
    for _ in range(2):
        run()
    return run
