# SPDX-License-Identifier: Apache-2.0
"""Make the Algorithm of a config.

Next: jaxmoe/rl/algorithm.py.
"""

from jaxmoe.config import Config
from jaxmoe.rl.algorithm import ARRAYS, CHOICES, Algorithm
from jaxmoe.rl.function_specs import parse_function, parse_functions
from jaxmoe.rl.presets import apply_preset
from jaxmoe.rl.validate import check_algorithm, check_staleness


def algorithm_from_config(cfg: Config) -> Algorithm:
    """Return the algorithm of a config, after a trial on abstract arrays.

    Raises ConfigError for an algorithm that cannot run: unknown names or options, arrays that are
    not available, groups that are too small, two corrections of the same mismatch.
    """
    loss = apply_preset(cfg.loss)
    functions = {
        name: parse_function(getattr(loss, name), f"loss.{name}", ARRAYS[name], CHOICES[name])
        for name in ("objective", "advantages", "aggregation", "kl")
    }
    algorithm = Algorithm(
        **functions,
        rollout_correction=parse_functions(
            loss.rollout_correction, "loss.rollout_correction", ARRAYS["rollout_correction"],
            CHOICES["rollout_correction"],
        ),
        old_logp=loss.old_logp, epochs=loss.epochs, minibatches=loss.minibatches,
        kl_coef=loss.kl_coef, kl_in=loss.kl_in, entropy_coef=loss.entropy_coef,
        critic=cfg.critic.backbone, value_coef=cfg.critic.loss_coef, value_clip=cfg.critic.clip,
    )  # fmt: skip
    check_algorithm(algorithm, cfg.rollout.samples_per_prompt)
    check_staleness(algorithm, cfg.rollout.max_staleness)
    return algorithm
