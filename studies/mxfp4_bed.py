# SPDX-License-Identifier: Apache-2.0
"""Beds of the four-bit study: ways to train a model whose experts are shipped in MXFP4.

    transitions  answers of 32 tokens, the reward is the share of right ones
    reversal     answers of 8 tokens, the reward is 1 or 0
    small_rate   reversal, where only experts train, so slowly that masters which begin at a code
                 do not reach the border to the next

The model that training starts from has experts whose values are four-bit codes, as the released
GPT-OSS has, and was trained to work with them. Every contender is evaluated with the experts that
it would ship. Next: studies/mxfp4_trained.py lists the contenders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import Config, DataConfig, ModelConfig, OptimConfig, RolloutConfig
from jaxmoe.config_file import override
from jaxmoe.model import make_engine_ops, make_ops
from jaxmoe.model.lora import with_adapters
from jaxmoe.model.rounded import (
    MATRICES,
    decode_experts,
    engine_rounding,
    round_experts,
    rounding_from_config,
)
from jaxmoe.rl.metrics.rounding_metrics import is_changed
from jaxmoe.rl.state import init_rl_state, init_run_adapters
from jaxmoe.shapes import Metrics, Params
from studies.bed import (
    WARM_STEPS,
    BedStep,
    BedTask,
    evaluate,
    load_warm_start,
    make_bed_step,
    make_rate_optimizer,
    sample_held_out,
    summarize_steps,
    take_step,
)
from studies.reversal import Reversal
from studies.transitions import Transitions


@dataclass(frozen=True)
class Mxfp4Bed:
    """A task and what its contenders share.

    warm_loss: the loss at which the warm start ends, in nats a token.
    settings: changes of `mxfp4_bed_config`.
    contenders: the names of those that it has; () for all.
    rates: that all contenders begin with; () if each has its own.
    """

    name: str
    task: BedTask
    warm_loss: float
    settings: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()


MXFP4_BEDS = {
    bed.name: bed
    for bed in (
        Mxfp4Bed(
            "transitions",
            Transitions(length=32),
            warm_loss=1.6,
            settings=("steps=12", "rollout.sequences_per_step=64"),
            rates=(2e-3, 4e-3),
        ),
        Mxfp4Bed("reversal", Reversal(), warm_loss=0.25),
        Mxfp4Bed(
            "small_rate",
            Reversal(),
            warm_loss=0.25,
            settings=("optim.trainable=.*(w_gate_up|w_down)",),
            rates=(1e-4,),
            contenders=(
                "dense, then rounded",
                "four bits on both sides",
                "four bits, least error",
                "four bits, stochastic",
            ),
        ),
    )
}


def mxfp4_bed_config(task: BedTask, steps: int, *settings: str) -> Config:
    """Return the config of a bed: two layers, 8 experts of which two are active, width 64."""
    cfg = Config(
        model=ModelConfig(
            vocab_size=task.vocab_size,
            d_model=64,
            n_layers=2,
            n_q_heads=4,
            n_kv_heads=2,
            head_dim=16,
            n_experts=8,
            experts_per_token=2,
            d_expert=64,
            dtype="float32",
            sliding_window=task.prompt_tokens + task.length,
            rope_theta=1000.0,
            rope_factor=1.0,
        ),
        data=DataConfig(task="study", max_prompt_tokens=task.prompt_tokens),
        rollout=RolloutConfig(
            sequences_per_step=128, samples_per_prompt=8, max_new_tokens=task.length
        ),
        optim=OptimConfig(lr=1.0, lr_warmup_steps=5, beta2=0.99),
        steps=steps,
    )
    return override(cfg, *settings)


def load_released(bed: Mxfp4Bed, seed: int, folder: Path, *, steps: int = WARM_STEPS) -> Params:
    """Return weights that were trained with rounded experts, whose experts are those values.

    They depend on the task and the loss alone, so beds that have the same share what is stored.
    """
    cfg = mxfp4_bed_config(bed.task, 1, "quant.experts=mxfp4")
    first = next(
        b for b in (*MXFP4_BEDS.values(), bed) if (b.task, b.warm_loss) == (bed.task, bed.warm_loss)
    )
    masters = load_warm_start(
        cfg, bed.task, seed, folder / first.name, steps=steps, max_loss=bed.warm_loss
    )
    return decode_experts(round_experts(masters), jnp.float32)


@dataclass(frozen=True)
class Mxfp4Programs:
    """The programs of one contender on one bed, compiled once for all seeds.

    read_by_engine: (trained weights, base) -> the weights that the engine samples with.
    shipped: (trained weights, base) -> weights with four-bit experts, and with LoRA's adapters.
    """

    step: BedStep
    read_by_engine: Callable[[Params, Params | None], Params]
    shipped: Callable[[Params, Params | None], Params]


def make_mxfp4_programs(bed: Mxfp4Bed, cfg: Config) -> Mxfp4Programs:
    """Return the programs of a config."""
    ops, shipped_rounding = make_ops(cfg), rounding_from_config(cfg) or round_experts
    return Mxfp4Programs(
        make_bed_step(cfg, bed.task, ops, make_engine_ops(cfg) or ops),
        jax.jit(partial(join_base, cfg=cfg, round_params=engine_rounding(cfg))),
        jax.jit(partial(join_base, cfg=cfg, round_params=shipped_rounding)),
    )


def join_base(
    params: Params,
    base: Params | None,
    *,
    cfg: Config,
    round_params: Callable[[Params], Params] | None,
) -> Params:
    """Return the trained weights, rounded, or the base with them as LoRA's adapters."""
    if base is not None:
        return with_adapters(base, params, cfg.lora.scales)
    return params if round_params is None else round_params(params)


def train_on_mxfp4_bed(
    programs: Mxfp4Programs,
    seed: int,
    released: Params,
    rate: float,
    *,
    report: Callable[[int, float], None] = lambda step, reward: None,
) -> Metrics:
    """Train from the released weights at a learning rate; return held-out scores and what happened.

    start, end: mean score of sampled answers to held-out prompts, by the model that would be
        shipped: experts in four bits, with LoRA base and adapters.
    end_unrounded: the same of the weights that the optimizer has.
    k3, ess: between engine and trainer, means over the steps.
    grad_norm_median, grad_norm_p99, ratio_max: over the steps.
    moved: share of the experts' values that differ from those at the start.
    moved_per_step: mean share in a step.
    """
    cfg, task, engine = programs.step.cfg, programs.step.task, programs.step.engine
    tx = make_rate_optimizer(cfg, rate)
    params, base = jax.tree.map(jnp.copy, released), None
    if cfg.lora.ranks:
        base = jax.jit(round_experts)(params)
        params = init_run_adapters(cfg, base)
    state = init_rl_state(params, cfg, tx)
    rng, held_out = np.random.default_rng((seed, 2)), sample_held_out(task, seed)
    rows: list[Metrics] = []
    codes_start = codes = programs.shipped(state.policy, base)
    start = evaluate(engine, task, codes, held_out, 0)
    for step in range(1, cfg.steps + 1):
        prompts, answers = task.sample_prompts(rng, cfg.rollout.prompts_per_step)
        state, row = take_step(
            programs.step,
            state,
            programs.read_by_engine(state.policy, base),
            prompts,
            answers,
            seed=seed,
            step=step,
            rate=rate,
            base=base,
        )
        before, codes = codes, programs.shipped(state.policy, base)
        rows.append(row | {"moved": changed_share(before, codes)})
        report(step, row["reward"])
        if not np.isfinite(row["grad/norm"]):
            break
    unrounded = join_base(state.policy, base, cfg=cfg, round_params=None)
    return summarize_mxfp4_steps(rows) | {
        "start": start,
        "end": evaluate(engine, task, codes, held_out, cfg.steps),
        "end_unrounded": evaluate(engine, task, unrounded, held_out, cfg.steps),
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


def summarize_mxfp4_steps(rows: Sequence[Metrics]) -> Metrics:
    """Return one number of each metric of the steps."""

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    return summarize_steps(rows) | {
        "grad_norm_median": float(np.median([row["grad/norm"] for row in rows])),
        "k3": mean("rollout_corr/k3_kl"),
        "ess": mean("rollout_corr/ess"),
        "moved_per_step": mean("moved"),
    }
