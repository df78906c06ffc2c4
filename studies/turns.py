# SPDX-License-Identifier: Apache-2.0
"""Ways to give the turns of an episode their credit, trained over seeds on tiny_turns.py.

Next: studies/config_study.py runs them.
"""

from jaxmoe.study.contenders import Contender
from studies.config_study import ConfigStudy

RATES = (1e-3, 2e-3, 4e-3)

TURNS = ConfigStudy(
    "turns",
    "ways to give the turns of an episode their credit, over seeds",
    "tiny_turns.py",
    (
        Contender("one reward an episode", ("loss.advantages=group_advantages",), RATES),
        Contender(
            "returns by turn", ("loss.advantages=turn_return_advantages(discount=0.9)",), RATES
        ),
        Contender("turn groups", ("loss.advantages=turn_group_advantages",), RATES),
        Contender("GiGPO", ("loss.advantages=gigpo",), RATES),
        Contender(
            "PPO, GAE by turn",
            (
                "loss.advantages=whitened_turn_gae(discount=0.9)",
                "critic.backbone=own",
                "critic.lr=2e-3",
                "critic.pretrain_steps=5",
            ),
            RATES,
        ),
    ),
    settings=("eval.every_steps=60",),
    tuning_seeds=1,
    run_seconds=110.0,
)
