# SPDX-License-Identifier: Apache-2.0
"""The beds of the mismatch study: a task and a model by answer length, engines, corrections.

Next: studies/mismatch_trained.py lists the contenders; studies/fused_bed.py trains one run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import Config, DataConfig, ModelConfig, OptimConfig, RolloutConfig
from jaxmoe.config.function_specs import select_arrays
from jaxmoe.config_file import override
from jaxmoe.losses.ratios import clamped_exp
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.model import make_ops
from jaxmoe.rl.from_config import algorithm_from_config
from studies.fused_bed import FusedBed
from studies.transitions import Transitions

_CORRECTION = "loss.rollout_correction="
# In the order of the numbers by which a program selects one.
CORRECTIONS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "token IS": (_CORRECTION + "token_is(high=2.0)",),
    "sequence IS": (_CORRECTION + "sequence_is(high=2.0)",),
    "IcePop": (_CORRECTION + "token_icepop(low=0.5, high=5.0)",),
    "geometric rejection": (
        _CORRECTION + "rejection(statistic='seq_mean_k1', low=0.999, high=1.001)",
    ),
    "drift mask": (_CORRECTION + "drift_mask(max_drift=0.05)",),
}


def mismatch_config(length: int, steps: int, *settings: str) -> Config:
    """Return the config of a bed: one layer, 8 experts of which two are active, width 32."""
    task = Transitions(length)
    cfg = Config(
        model=ModelConfig(
            vocab_size=task.vocab_size,
            d_model=32,
            n_layers=1,
            n_q_heads=2,
            n_kv_heads=1,
            head_dim=8,
            n_experts=8,
            experts_per_token=2,
            d_expert=32,
            dtype="float32",
            layer_types="full",
            sliding_window=task.prompt_tokens + length,
            rope_theta=1000.0,
            rope_factor=1.0,
        ),
        data=DataConfig(task="study", max_prompt_tokens=task.prompt_tokens),
        rollout=RolloutConfig(sequences_per_step=64, samples_per_prompt=8, max_new_tokens=length),
        optim=OptimConfig(lr=1.0, lr_warmup_steps=5, beta2=0.99),
        steps=steps,
    )
    # Dropped tokens do not count in the mean, as in verl's decoupled presets.
    shared = "loss.aggregation=kept_token_mean", "loss.minibatches=2", "loss.old_logp=recomputed"
    return override(cfg, *shared, *settings)


_FUNCTIONS = [
    fn
    for settings in CORRECTIONS.values()
    for fn in (*algorithm_from_config(mismatch_config(1, 1, *settings)).rollout_correction,)[:1]
    or (None,)
]


def choose_correction(
    log_ratio_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    correction: Int[Array, ""],
) -> Correction:
    """Return the correction of that number in CORRECTIONS.

    All of them are computed, so that one program serves every contender.
    """
    arrays = {"log_ratio_BT": log_ratio_BT, "advantages_BT": advantages_BT, "mask_BT": mask_BT}
    results = [Correction() if fn is None else fn(**select_arrays(fn, arrays)) for fn in _FUNCTIONS]
    shape = log_ratio_BT.shape
    ones_BT, all_BT = jnp.ones(shape, jnp.float32), jnp.ones(shape, bool)
    weights = jnp.stack([ones_BT if r.weights_BT is None else r.weights_BT for r in results])
    keep = jnp.stack(
        [all_BT if r.keep_BT is None else jnp.broadcast_to(r.keep_BT, shape) for r in results]
    )
    ratio_BT = clamped_exp(log_ratio_BT)
    return Correction(weights[correction], keep[correction], ratio_BT, ~all_BT)


def make_fused_bed(cfg: Config, length: int, **engine: Any) -> FusedBed:
    """Return the bed of a config; with old log-probs it takes its correction as an argument.

    engine: fields of FusedBed.
    """
    algorithm = algorithm_from_config(cfg)
    if algorithm.corrects_before_updates:
        algorithm = replace(algorithm, rollout_correction=(choose_correction,))
    return FusedBed(cfg, Transitions(length), algorithm, make_ops(cfg), **engine)
