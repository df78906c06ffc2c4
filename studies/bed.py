# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the beds of trained studies: warm starts, a step of RL, evaluation.

A bed is a small model and a task that makes its own prompts. Everything is made from a config by
the functions that `python -m jaxmoe.train` calls.
Next: studies/router_bed.py and studies/mxfp4_bed.py.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.batches.batch import Batch, rollout_batch, supervised_batch
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.batches.sharing_from_config import sharing_from_config
from jaxmoe.config import Config, OptimConfig
from jaxmoe.model import Ops, init_params, make_ops
from jaxmoe.model.rounded import trainer_rounding
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, TrainState, init_state
from jaxmoe.rl.step import supervised_loss_fn, train_step
from jaxmoe.rl.update import rl_step
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.run.programs import rl_program
from jaxmoe.run_files import replace_file
from jaxmoe.shapes import Metrics, Params

N_EVAL_PROMPTS = 256  # prompts
WARM_STEPS, WARM_ROWS, WARM_LR = 1500, 64, 3e-3


@runtime_checkable
class BedTask(Protocol):
    """A task that makes prompts from random numbers, and knows their answers."""

    @property
    def length(self) -> int: ...  # tokens of an answer

    @property
    def vocab_size(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    def sample_prompts(
        self, rng: np.random.Generator, count: int
    ) -> tuple[list[Prompt], np.ndarray]: ...

    def score(self, rollouts: list[Rollout], answers: np.ndarray) -> np.ndarray: ...


def train_warm_start(
    cfg: Config, task: BedTask, seed: int, *, steps: int = WARM_STEPS, max_loss: float
) -> tuple[Params, float]:
    """Train on right answers until the mean loss of ten steps is below `max_loss`, nats a token.

    Returns the weights and that loss.
    """
    tx = make_optimizer(OptimConfig(lr=WARM_LR, lr_warmup_steps=20, beta2=0.99), steps=steps)
    state = init_state(Trained(init_params(jax.random.key(seed), cfg.model)), tx)
    scorer = Scorer(cfg.model, make_ops(cfg), round_params=trainer_rounding(cfg))
    loss_fn = partial(supervised_loss_fn, scorer=scorer)
    step_fn = jax.jit(
        partial(train_step, tx=tx, loss_fn=loss_fn, prepare=scorer.pack_policy), donate_argnums=0
    )
    rng, losses = np.random.default_rng((seed, 1)), deque(maxlen=10)
    for _ in range(steps):
        prompts, answers = task.sample_prompts(rng, WARM_ROWS)
        batch = supervised_batch(prompts, answers.tolist(), length=cfg.context, pad_id=0)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            state, metrics = step_fn(state, batch)
        losses.append(metrics["loss"])
        if len(losses) == 10 and float(np.mean(jax.device_get(list(losses)))) < max_loss:
            break
    return jax.tree.map(np.asarray, state.policy), float(np.mean(jax.device_get(list(losses))))


def load_warm_start(
    cfg: Config, task: BedTask, seed: int, folder: Path, *, steps: int = WARM_STEPS, max_loss: float
) -> Params:
    """Return the weights of `train_warm_start`, which are stored in `folder`."""
    path = folder / f"warm_start_{seed}.npz"
    tree = jax.eval_shape(lambda: init_params(jax.random.key(0), cfg.model))
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(key, simple=True, separator="/") for key, _ in leaves]
    if not path.is_file():
        params, _ = train_warm_start(cfg, task, seed, steps=steps, max_loss=max_loss)
        folder.mkdir(parents=True, exist_ok=True)
        # Replaced when complete, so that neither an interruption nor another study beside this one
        # leaves a half-written file.
        with replace_file(path) as file:
            np.savez(file, **dict(zip(names, jax.tree.leaves(params), strict=True)))
    with np.load(path) as stored:
        return jax.tree.unflatten(structure, [jnp.asarray(stored[name]) for name in names])


def make_rate_optimizer(cfg: Config, rate: Any) -> optax.GradientTransformation:
    """The optimizer of the config, whose rate is 1, with its updates times `rate`.

    Adam's update is proportional to its rate, and there is no weight decay. So the rate can be an
    array, and a step is compiled once for all rates.
    """
    return optax.chain(rl_optimizer(cfg), optax.scale(rate))


def open_bed_engine(cfg: Config, ops: Ops) -> NativeEngine:
    return NativeEngine(
        cfg.model,
        ops,
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        max_rows=cfg.rollout.sequences_per_step,
        max_new_tokens=cfg.rollout.max_new_tokens,
        keep_experts=cfg.records_experts,
    )


def sample_batch(
    engine: NativeEngine,
    cfg: Config,
    task: BedTask,
    prompts: list[Prompt],
    answers: np.ndarray,
    *,
    seed: int,
) -> tuple[Batch, float]:
    """Sample answers by the loaded weights; return the batch and the mean reward."""
    samples = cfg.rollout.samples_per_prompt
    rollouts = engine.generate(
        prompts, Sampling(task.length, (), explores=True), seed=seed, samples=samples
    )
    rewards = task.score(rollouts, answers)
    batch = rollout_batch(
        rollouts,
        rewards,
        samples=samples,
        length=cfg.context,
        pad_id=0,
        n_experts=cfg.model.n_experts if cfg.records_experts else None,
    )
    return batch, float(rewards.mean())


@dataclass(frozen=True)
class BedStep:
    """The parts of one contender's step of RL, compiled once for all seeds.

    engine: samples the answers.
    sharing: how a step shares prompts, as `optim.share_prompts` says; None if it does not.
    fn: (state, batch, minibatches, base, rate) -> (state, metrics, token_stats).
    """

    cfg: Config
    task: BedTask
    algorithm: Algorithm
    engine: NativeEngine
    sharing: PromptSharing | None
    fn: Callable[..., Any]


def make_bed_step(
    cfg: Config, task: BedTask, ops: Ops, engine_ops: Ops, *, step: Callable[..., Any] = rl_step
) -> BedStep:
    """Return the step of a config; `step` takes the arguments of `rl_step`."""
    algorithm = algorithm_from_config(cfg)

    def fn(
        state: TrainState, batch: Batch, minibatches: Any, base: Params | None, rate: Any
    ) -> Any:
        tx = make_rate_optimizer(cfg, rate)
        program = rl_program(cfg, ops, None, algorithm, tx, state, step=step)
        program.check(state, batch, minibatches, base)  # while it is traced, once
        return program.fn(state, batch, minibatches, base)

    engine = open_bed_engine(cfg, engine_ops)
    sharing = sharing_from_config(cfg, ops.attend)
    return BedStep(cfg, task, algorithm, engine, sharing, jax.jit(fn, donate_argnums=0))


def take_step(
    bed_step: BedStep,
    state: TrainState,
    sampling_policy: Params,
    prompts: list[Prompt],
    answers: np.ndarray,
    *,
    seed: int,
    step: int,
    rate: float,
    base: Params | None = None,
) -> tuple[TrainState, Metrics]:
    """Sample answers by `sampling_policy`, score them, and make the updates of one step.

    base: the frozen weights below LoRA's adapters.
    Returns the state after them, and the step's metrics with the mean `reward`.
    """
    bed_step.engine.load(sampling_policy, step - 1)
    batch, reward = sample_batch(
        bed_step.engine, bed_step.cfg, bed_step.task, prompts, answers, seed=seed * 1000 + step
    )
    batch, minibatches = split_minibatches(
        batch, bed_step.algorithm, seed=(seed, step), sharing=bed_step.sharing
    )
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        state, metrics, _ = bed_step.fn(state, batch, minibatches, base, jnp.float32(rate))
    fetched = jax.device_get(metrics).items()
    row = {name: float(x) for name, x in fetched if np.ndim(x) == 0}
    return state, row | {"reward": reward}


def summarize_steps(rows: Sequence[Metrics]) -> Metrics:
    """Return one number of each metric of the steps that every bed reports, and their rewards."""
    return {
        "rewards": [round(row["reward"], 4) for row in rows],
        "steps": float(len(rows)),
        "reward_last_5": float(np.mean([row["reward"] for row in rows[-5:]])),
        "grad_norm_p99": float(np.percentile([row["grad/norm"] for row in rows], 99)),
        "ratio_max": max(row["policy/ratio_max"] for row in rows),
    }


def sample_held_out(task: BedTask, seed: int) -> tuple[list[Prompt], np.ndarray]:
    """Return the prompts of evaluation and their answers."""
    return task.sample_prompts(np.random.default_rng((seed, 3)), N_EVAL_PROMPTS)


def evaluate(
    engine: NativeEngine,
    task: BedTask,
    params: Params,
    held_out: tuple[list[Prompt], np.ndarray],
    step: int,
) -> float:
    """Return the mean score of one sampled answer to each held-out prompt."""
    prompts, answers = held_out
    engine.load(params, step)
    rollouts = engine.generate(prompts, Sampling(task.length, ()), seed=5)
    return float(task.score(rollouts, answers).mean())
