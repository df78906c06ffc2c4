# SPDX-License-Identifier: Apache-2.0
"""Beds of the router study: one small MoE and task, disturbed where Top-K routing hurts.

    two_forwards    the log-probs before the first update come from another forward, whose routers
                    have noise: the on-policy violation of a trainer with two programs
    noisy_engine    the engine's routers have noise, and the ratio compares with the engine
    many_updates    four updates of each batch, sampled by weights that are four steps old
    undisturbed     the same without any of these

Less and more noise than that of `two_forwards` is in `two_forwards_mild` and `two_forwards_strong`.

A contender is a list of `--set` changes of the bed's config. Everything is made from that config by
the functions that `python -m jaxmoe.train` calls; only the task, the noise and the old weights are
the study's. Next: studies/router_trained.py lists the contenders.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import (
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RouterConfig,
)
from jaxmoe.config_file import override
from jaxmoe.model import Ops, make_engine_ops, make_ops
from jaxmoe.model.moe.router import RouterContext, replay_routing
from jaxmoe.model.moe.router_noise import normal_noise, route_with_noise
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import init_rl_state
from jaxmoe.rl.update import rl_step
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.shapes import Metrics, Params
from studies.bed import (
    WARM_STEPS,
    BedStep,
    evaluate,
    load_warm_start,
    make_bed_step,
    make_rate_optimizer,
    open_bed_engine,
    sample_held_out,
    summarize_steps,
    take_step,
)
from studies.transitions import Transitions

WARM_LOSS = 1.6  # nats per token at which the warm start ends; demonstrations have 1.5
NOISE = 0.7  # changes the experts of three tokens in five


@dataclass(frozen=True)
class Bed:
    """A disturbance of the router, and the settings that all contenders share."""

    name: str
    settings: tuple[str, ...] = ()
    engine_noise: float = 0.0  # deviation of the noise on the engine's router logits
    old_noise: float = 0.0  # of the forward that scores old log-probs
    staleness: int = 0  # steps between the weights that sample and those that train
    # The names of its contenders; () for all. They may be added to, so results do not depend on it.
    contenders: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        """The name of the bed's results."""
        return f"{self!r}, {TASK}"


_TWO_UPDATES = ("loss.minibatches=2", "loss.old_logp=recomputed")
_MAIN = ("nothing", "detached old log-probs", "dual clip 3", "token IS", "R2", "R3")
BEDS = {
    bed.name: bed
    for bed in (
        Bed("undisturbed", _TWO_UPDATES),
        Bed("two_forwards", _TWO_UPDATES, old_noise=NOISE),
        Bed(
            "noisy_engine",
            ("loss.minibatches=2", "loss.old_logp=rollout", "rollout.compare_experts=True"),
            engine_noise=NOISE,
        ),
        Bed("many_updates", ("loss.minibatches=4", "loss.old_logp=rollout"), staleness=4),
        Bed("two_forwards_mild", _TWO_UPDATES, old_noise=0.3, contenders=_MAIN),
        Bed("two_forwards_strong", _TWO_UPDATES, old_noise=1.0, contenders=_MAIN),
    )
}
TASK = Transitions(length=32)


def bed_config(steps: int, *settings: str) -> Config:
    """Return the config of a bed: two layers, 16 experts of which two are active, width 32."""
    cfg = Config(
        model=ModelConfig(
            vocab_size=TASK.vocab_size,
            d_model=32,
            n_layers=2,
            n_q_heads=4,
            n_kv_heads=2,
            head_dim=8,
            n_experts=16,
            experts_per_token=2,
            d_expert=16,
            dtype="float32",
            sliding_window=TASK.prompt_tokens + TASK.length,
            rope_theta=1000.0,
            rope_factor=1.0,
        ),
        data=DataConfig(task="study", max_prompt_tokens=TASK.prompt_tokens),
        rollout=RolloutConfig(
            sequences_per_step=64, samples_per_prompt=8, max_new_tokens=TASK.length
        ),
        loss=LossConfig(),
        router=RouterConfig(),
        optim=OptimConfig(lr=1.0, lr_warmup_steps=5, beta2=0.99),
        steps=steps,
    )
    return override(cfg, *settings)


def load_bed_weights(seed: int, folder: Path, *, steps: int = WARM_STEPS) -> Params:
    """Return the weights that all contenders start from, which are stored in `folder`."""
    return load_warm_start(bed_config(1), TASK, seed, folder, steps=steps, max_loss=WARM_LOSS)


def route_disturbed(
    h_BTD: Any,
    layer: Params,
    *,
    active: int,
    context: RouterContext,
    scale: Any,
    indices_BTA: Any = None,
) -> Any:
    """A router with noise in every forward, as that of a program that rounds otherwise; replayed
    experts are used as they are. The scale may be an array."""
    context = replace(context, exploration=jnp.asarray(scale, jnp.float32))
    indices, weights = route_with_noise(
        h_BTD, layer, active=active, context=context, noise=normal_noise, scale=1.0
    )
    if indices_BTA is None:
        return indices, weights
    selected_BTA = jnp.where(indices_BTA < 0, indices, indices_BTA)
    return replay_routing(h_BTD, layer, active=active, indices_BTA=selected_BTA)


def disturb(ops: Ops, scale: float) -> Ops:
    """Return ops whose routers have noise; the same ops for scale 0."""
    return replace(ops, router=partial(route_disturbed, scale=scale)) if scale else ops


@dataclass(frozen=True)
class BedPrograms:
    """The programs of one contender on one bed, compiled once for all seeds.

    clean_engine: that of evaluation; it samples by the trainer's policy.
    """

    bed: Bed
    step: BedStep
    clean_engine: NativeEngine


def make_bed_programs(bed: Bed, cfg: Config) -> BedPrograms:
    """Return the programs of a config, with the bed's noise."""
    ops, old_scorer = make_ops(cfg), None
    engine_ops = make_engine_ops(cfg) or ops
    if bed.old_noise:
        old_ops = disturb(ops, bed.old_noise)
        old_scorer = Scorer(cfg.model, old_ops, replay=cfg.router.replay)
    step = make_bed_step(
        cfg,
        TASK,
        ops,
        disturb(engine_ops, bed.engine_noise),
        step=partial(rl_step, old_scorer=old_scorer),
    )
    return BedPrograms(bed, step, open_bed_engine(cfg, engine_ops))


def train_on_bed(
    programs: BedPrograms,
    seed: int,
    params: Params,
    rate: float,
    *,
    report: Callable[[int, float], None] = lambda step, reward: None,
) -> Metrics:
    """Train from `params` at a learning rate; return held-out shares and what happened.

    start, end: mean score of sampled answers on N_EVAL_PROMPTS prompts, by the clean policy.
    grad_norm_p99, ratio_max: over the steps.
    switches: share of (token, layer) whose expert set differs between engine and trainer, where the
        bed compares them.
    """
    cfg = programs.step.cfg
    state = init_rl_state(jax.tree.map(jnp.copy, params), cfg, make_rate_optimizer(cfg, rate))
    rng = np.random.default_rng((seed, 2))
    held_out = sample_held_out(TASK, seed)
    policies: deque[Params] = deque(maxlen=programs.bed.staleness + 1)
    rows: list[Metrics] = []
    start = evaluate(programs.clean_engine, TASK, state.policy, held_out, 0)
    for step in range(1, cfg.steps + 1):
        prompts, answers = TASK.sample_prompts(rng, cfg.rollout.prompts_per_step)
        # The step donates the state, so that weights of a later use are copied.
        policies.append(jax.tree.map(jnp.copy, state.policy))
        state, row = take_step(
            programs.step, state, policies[0], prompts, answers, seed=seed, step=step, rate=rate
        )
        rows.append(row)
        report(step, row["reward"])
        if not np.isfinite(row["grad/norm"]):
            break
    switches = [row.get("router/expert_switches", np.nan) for row in rows]
    return summarize_steps(rows) | {
        "switches": float(np.mean(switches)),
        "start": start,
        "end": evaluate(programs.clean_engine, TASK, state.policy, held_out, cfg.steps),
    }
