# SPDX-License-Identifier: Apache-2.0
"""A teacher, rewards, and both, trained over seeds on tiny_distill.py.

The teacher is the run of tiny.py in runs/tiny. Next: studies/config_study.py runs them.
"""

from jaxmoe.study.contenders import Contender
from studies.config_study import ConfigStudy

RATES = (3e-4, 6e-4, 1.2e-3)

TEACHERS = ConfigStudy(
    "teachers",
    "a teacher, rewards, and both, over seeds",
    "tiny_distill.py",
    (
        Contender(
            "rewards",
            (
                "distill.teacher=",
                "distill.reverse_kl_coef=0",
                "distill.reward_coef=1",
                "rollout.samples_per_prompt=16",
            ),
            RATES,
        ),
        Contender("teacher", (), RATES),
        Contender("teacher and rewards", ("distill.reward_coef=1",), RATES),
    ),
    settings=("warmup.steps=140", "steps=150", "eval.every_steps=25", "save.every_steps=150"),
    seeds=5,
    tuning_seeds=1,
    run_seconds=120.0,
    teacher="tiny.py",
)
