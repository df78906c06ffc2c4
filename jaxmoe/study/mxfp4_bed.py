# SPDX-License-Identifier: Apache-2.0
"""Beds of the four-bit study: ways to train a model whose experts are shipped in MXFP4.

    automaton    answers of 32 tokens, the reward is the share of right ones
    reversal     answers of 8 tokens, the reward is 1 or 0
    small_rate   reversal, where only experts train, so slowly that masters which begin at a code
                 do not reach the border to the next

The model that training starts from has experts whose values are four-bit codes, as the released
GPT-OSS has, and was trained to work with them. Every contender is evaluated with the experts that
it would ship. Next: jaxmoe/study/mxfp4_trained.py lists the contenders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import Config, DataConfig, ModelConfig, OptimConfig, RolloutConfig
from jaxmoe.config_file import override
from jaxmoe.model import Ops, make_engine_ops, make_ops
from jaxmoe.model.lora import with_adapters
from jaxmoe.model.rounded import (
    MATRICES,
    decode_experts,
    engine_rounding,
    round_experts,
    rounding_from_config,
)
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.rounding_metrics import is_changed
from jaxmoe.rl.state import TrainState, init_rl_state, init_run_adapters
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.run.programs import rl_program
from jaxmoe.shapes import Metrics, Params
from jaxmoe.study.automaton import Automaton
from jaxmoe.study.bed import (
    BedTask,
    evaluate,
    load_warm_start,
    make_rate_optimizer,
    open_bed_engine,
    sample_batch,
    sample_held_out,
)
from jaxmoe.study.reversal import Reversal


@dataclass(frozen=True)
class Mxfp4Bed:
    """A task and what its contenders share.

    warm_loss: the loss at which the warm start ends, in nats a token.
    settings: changes of `mxfp4_bed_config`.
    contenders: the names of those that it has; () for all.
    rate: the learning rate of all contenders; None if each has rates of its own.
    """

    name: str
    task: BedTask
    warm_loss: float
    settings: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    rate: float | None = None


MXFP4_BEDS = {
    bed.name: bed
    for bed in (
        Mxfp4Bed("automaton", Automaton(), warm_loss=0.15),
        Mxfp4Bed("reversal", Reversal(), warm_loss=0.25),
        Mxfp4Bed(
            "small_rate", Reversal(), warm_loss=0.25,
            settings=("optim.trainable=.*(w_gate_up|w_down)",), rate=1e-4,
            contenders=(
                "dense, then rounded", "four bits on both sides", "four bits, least error",
                "four bits, stochastic",
            ),
        ),
    )
}  # fmt: skip


def mxfp4_bed_config(task: BedTask, steps: int, *settings: str) -> Config:
    """Return the config of a bed: two layers, 8 experts of which two are active, width 64."""
    cfg = Config(
        model=ModelConfig(
            vocab_size=task.vocab_size, d_model=64, n_layers=2, n_q_heads=4, n_kv_heads=2,
            head_dim=16, n_experts=8, experts_per_token=2, d_expert=64, dtype="float32",
            sliding_window=2 * task.length + 4, rope_theta=1000.0, rope_factor=1.0,
        ),
        data=DataConfig(task="study", max_prompt_tokens=task.prompt_tokens),
        rollout=RolloutConfig(
            sequences_per_step=128, samples_per_prompt=8, max_new_tokens=task.length
        ),
        optim=OptimConfig(lr=1.0, lr_warmup_steps=5, beta2=0.99),
        steps=steps,
    )  # fmt: skip
    return override(cfg, *settings)


def load_released(bed: Mxfp4Bed, seed: int, folder: Path) -> Params:
    """Return weights that were trained with rounded experts, whose experts are those values."""
    cfg = mxfp4_bed_config(bed.task, 1, "quant.experts=mxfp4")
    masters = load_warm_start(cfg, bed.task, seed, folder / bed.name, max_loss=bed.warm_loss)
    return decode_experts(round_experts(masters), jnp.float32)


@dataclass
class Mxfp4Programs:
    """The compiled step and engine of one contender on one bed, for all seeds."""

    bed: Mxfp4Bed
    cfg: Config
    algorithm: Any = field(init=False)

    def __post_init__(self) -> None:
        self.algorithm = algorithm_from_config(self.cfg)

    @cached_property
    def ops(self) -> Ops:
        return make_ops(self.cfg)

    @cached_property
    def engine(self) -> NativeEngine:
        return open_bed_engine(self.cfg, make_engine_ops(self.cfg) or self.ops)

    @cached_property
    def read_by_engine(self) -> Callable[[Params, Params | None], Params]:
        """(trained weights, base) -> the weights that the engine samples with."""
        return jax.jit(lambda params, base: self._combine(params, base, engine_rounding(self.cfg)))

    @cached_property
    def shipped(self) -> Callable[[Params, Params | None], Params]:
        """(trained weights, base) -> weights with four-bit experts, and with LoRA's adapters."""
        round_params = rounding_from_config(self.cfg) or round_experts
        return jax.jit(lambda params, base: self._combine(params, base, round_params))

    def _combine(
        self, params: Params, base: Params | None, round_params: Callable[[Params], Params] | None
    ) -> Params:
        if base is not None:
            return with_adapters(base, params, self.cfg.lora.scales)
        return params if round_params is None else round_params(params)

    @cached_property
    def step_fn(self) -> Callable[..., Any]:
        """The step: (state, batch, minibatches, base, rate) -> (state, metrics, token_stats)."""

        def step(
            state: TrainState, batch: Batch, minibatches: Any, base: Params | None, rate: Any
        ) -> Any:
            program = rl_program(
                self.cfg, self.ops, None, self.algorithm, make_rate_optimizer(self.cfg, rate), state
            )
            return program.fn(state, batch, minibatches, base)

        return jax.jit(step, donate_argnums=0)


def train_on_mxfp4_bed(
    programs: Mxfp4Programs, seed: int, released: Params, rate: float, *,
    report: Callable[[int, float], None] = lambda step, reward: None,
) -> Metrics:  # fmt: skip
    """Train from the released weights at a learning rate; return held-out scores and what happened.

    start, end: mean score of sampled answers to held-out prompts, by the model that would be
        shipped: experts in four bits, with LoRA base and adapters.
    end_unrounded: the same of the weights that the optimizer has.
    k3, ess: between engine and trainer, means over the steps.
    grad_norm_median, grad_norm_p99, ratio_max: over the steps.
    moved: share of the experts' values that differ from those at the start.
    moved_per_step: mean share in a step.
    """
    cfg, task = programs.cfg, programs.bed.task
    tx = make_rate_optimizer(cfg, rate)
    params, base = jax.tree.map(jnp.copy, released), None
    if cfg.lora.ranks:
        base = jax.jit(round_experts)(params)
        params = init_run_adapters(cfg, base)
    state = init_rl_state(params, cfg, tx)
    rng, held_out = np.random.default_rng((seed, 2)), sample_held_out(task, seed)
    rows: list[Metrics] = []
    codes_start = codes = programs.shipped(state.policy, base)
    start = evaluate(programs.engine, task, codes, held_out, 0)
    for step in range(1, cfg.steps + 1):
        prompts, answers = task.sample_prompts(rng, cfg.rollout.prompts_per_step)
        programs.engine.load(programs.read_by_engine(state.policy, base), step - 1)
        batch, reward = sample_batch(
            programs.engine, cfg, task, prompts, answers, seed=seed * 1000 + step
        )
        batch, minibatches = split_minibatches(batch, programs.algorithm, seed=(seed, step))
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            state, metrics, _ = programs.step_fn(state, batch, minibatches, base, jnp.float32(rate))
        fetched = jax.device_get(metrics).items()
        row = {name: float(x) for name, x in fetched if np.ndim(x) == 0}
        before, codes = codes, programs.shipped(state.policy, base)
        rows.append(row | {"reward": reward, "moved": changed_share(before, codes)})
        report(step, reward)
        if not np.isfinite(row["grad/norm"]):
            break
    unrounded = programs._combine(state.policy, base, None)
    return summarize_steps(rows) | {
        "start": start,
        "end": evaluate(programs.engine, task, codes, held_out, cfg.steps),
        "end_unrounded": evaluate(programs.engine, task, unrounded, held_out, cfg.steps),
        "moved": changed_share(codes_start, codes),
    }


def changed_share(old: Params, new: Params) -> float:
    """Share of the experts' values that differ; 0 for the frozen base of LoRA."""
    changed, count = 0.0, 0
    for kind, layer in new["layers"].items():
        for name in MATRICES:
            packed = layer[name]
            if not hasattr(packed, "nibbles_EDF"):
                return 0.0
            changed += float(jnp.sum(is_changed(old["layers"][kind][name], packed)))
            count += 2 * packed.nibbles_EDF.size
    return changed / count


def summarize_steps(rows: Sequence[Metrics]) -> Metrics:
    """Return one number of each metric of the steps."""
    norms = [row["grad/norm"] for row in rows]

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    return {
        "steps": float(len(rows)),
        "reward_last_5": float(np.mean([row["reward"] for row in rows[-5:]])),
        "grad_norm_median": float(np.median(norms)),
        "grad_norm_p99": float(np.percentile(norms, 99)),
        "ratio_max": max(row["policy/ratio_max"] for row in rows),
        "k3": mean("rollout_corr/k3_kl"),
        "ess": mean("rollout_corr/ess"),
        "moved_per_step": mean("moved"),
    }
