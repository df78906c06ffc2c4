# SPDX-License-Identifier: Apache-2.0
"""A config's algorithm: its functions read, its preset filled in, refused where it cannot work.

Next: jaxmoe/rl/algorithm.py.
"""

from jaxmoe.config import Config
from jaxmoe.rl.algorithm import ARRAYS, Algorithm
from jaxmoe.rl.function_specs import read, read_several
from jaxmoe.rl.presets import with_preset
from jaxmoe.rl.validate import check, check_stale


def algorithm(cfg: Config) -> Algorithm:
    """The algorithm of a config, tried on arrays of the run's shapes.

    Raises ConfigError for what could not run: unknown names and options, arrays that are not
    there, groups too small, two corrections of the same thing.
    """
    loss = with_preset(cfg.loss)
    functions = {
        name: read(getattr(loss, name), f"loss.{name}", ARRAYS[name])
        for name in ("objective", "advantages", "aggregation", "kl")
    }
    made = Algorithm(
        **functions,
        rollout_correction=read_several(
            loss.rollout_correction, "loss.rollout_correction", ARRAYS["rollout_correction"]
        ),
        old_logp=loss.old_logp, epochs=loss.epochs, minibatches=loss.minibatches,
        kl_coef=loss.kl_coef, kl_in=loss.kl_in, entropy_coef=loss.entropy_coef,
        critic=cfg.critic.backbone, value_coef=cfg.critic.loss_coef, value_clip=cfg.critic.clip,
    )  # fmt: skip
    check(made, cfg.rollout.samples_per_prompt)
    check_stale(made, cfg.rollout.max_staleness)
    return made
