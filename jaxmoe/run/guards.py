# SPDX-License-Identifier: Apache-2.0
"""Checks after each step that stop a run, and their messages. Next: jaxmoe/train.py."""

import numpy as np

from jaxmoe.batches.batch import Batch
from jaxmoe.config import Config, ConfigError, ModelConfig
from jaxmoe.model import Ops
from jaxmoe.parallel.finite import find_not_finite
from jaxmoe.reconcile.first_difference import find_first_difference
from jaxmoe.shapes import Metrics, Params


def check_finite(
    metrics: Metrics,
    step: int,
    *,
    rate: tuple[str, float],
    cfg: Config,
    policy: Params,
) -> None:
    """Raise ConfigError if a metric of the step is not finite, or an expert that is rounded.

    `policy` is the one after the step. An expert without tokens
    changes no loss, and a step later all others are broken too, and saved. So experts are read
    here, unless `quant/relative_error` is among the metrics, in which every expert counts.
    """
    bad = [name for name, value in metrics.items() if not np.isfinite(value).all()]
    are_measured = not bad and "quant/relative_error" in metrics
    reads_experts = cfg.quant.experts != "none" and not are_measured
    place = find_not_finite(policy, cfg.model) if reads_experts else ""
    if bad or place:
        name, lr = rate
        broken = f"; the step broke {place}" if place else ""
        raise ConfigError(
            f"step {step}: {', '.join(bad) or 'experts'} must be finite{broken}. Try --set "
            f"{name}={lr / 10:g}, or a smaller optim.clip_norm."
        )


def invariance_error(
    gap: float,
    params: Params,
    batch: Batch,
    logp_BT: np.ndarray,
    step: int,
    cfg: ModelConfig,
    ops: Ops,
) -> ConfigError:
    """Return the error for log-probs that must be bitwise equal and are not.

    It names the first token whose log-probs differ from the engine's, and its first different
    activation. params: those that sampled the batch; logp_BT: the trainer's.
    """
    mask_BT = np.asarray(batch.loss_mask_BT)
    differs_BT = mask_BT & (logp_BT != np.asarray(batch.rollout_logp_BT))
    row = int(np.argmax(differs_BT.any(1)))
    column = int(np.argmax(differs_BT[row]))
    # The model reads a context alone.
    segments_T = np.asarray(batch.segment_ids_BT[row])
    in_context_T = segments_T == segments_T[column]
    tokens = np.asarray(batch.tokens_BT[row])[in_context_T]
    prompt = int(np.argmax(mask_BT[row][in_context_T]))
    made_steps = int(batch.shared.get("step", 0))
    difference = find_first_difference(params, tokens, prompt, cfg, ops, step=made_steps)
    difference = difference or "equal when computed alone, but not in the batch"
    return ConfigError(
        f"rl step {step}: with model.numerics=invariant trainer and engine must agree to the bit; "
        f"max |Δlogp| is {gap:.3g}. First in rollout {row}, token {column}: {difference}. "
        "This batch was not trained on, and the state before it is saved. Try --set "
        "model.numerics=fast, and report the versions in config.json."
    )


def gate_error(cfg: Config, metrics: Metrics, step: int) -> ConfigError:
    """Return the error for a difference between engine and trainer above the gate."""
    names = "train_rollout_logprob_abs_diff", "rollout_corr/k3_kl", "rollout_corr/ess"
    gap, k3, ess = (metrics[name] for name in names)
    return ConfigError(
        f"rl step {step}: engine and trainer must agree within gate.abs_diff={cfg.gate.abs_diff},"
        f" gate.k3={cfg.gate.k3}, gate.ess={cfg.gate.ess}; got |Δlogp| {gap:.3g}, k3 {k3:.3g}, "
        f"ESS {ess:.3g}. This batch was not trained on, and the state before it is saved. "
        "Check that the engine has the newest weights in the same dtype; or skip such batches "
        "with --set gate.skip=True."
    )
