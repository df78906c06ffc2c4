# SPDX-License-Identifier: Apache-2.0
"""The optax chain. Next: jaxmoe/rl/step.py applies it."""

import optax

from jaxmoe.config import OptimConfig


def make_optimizer(
    cfg: OptimConfig, *, steps: int, lr: float | None = None
) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with linear warm-up and cosine decay over `steps`."""
    peak = cfg.lr if lr is None else lr
    decay = max(steps - cfg.lr_warmup_steps, 1)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(peak / max(cfg.lr_warmup_steps, 1), peak, cfg.lr_warmup_steps),
            optax.cosine_decay_schedule(peak, decay, alpha=cfg.lr_end_fraction),
        ],
        [cfg.lr_warmup_steps],
    )
    adamw = optax.adamw(
        schedule, b1=cfg.beta1, b2=cfg.beta2, eps=cfg.eps, weight_decay=cfg.weight_decay
    )
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), adamw)
