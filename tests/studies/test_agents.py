# SPDX-License-Identifier: Apache-2.0
"""The studies of agents: what their table says of alerts and of earned rewards."""

from jaxmoe.study import ChosenRate, Comparison
from studies.agents import EARNED, LEAKS, format_leaks


def compare(contender, earned, alerts):
    rewards = [[step, 0.0, 0.1 * step] for step in range(1, 6)]
    runs = [
        {"evaluated": {EARNED: share}, "alerts": first, "rewards": rewards}
        for share, first in zip(earned, alerts, strict=True)
    ]
    return Comparison(contender, (ChosenRate(None),), [0.8] * len(runs), runs)


def test_the_first_alert_of_each_run_counts():
    honest, leaky, _ = LEAKS.contenders
    grader, swapped = "reward/second_grader_disagrees", "reward/swapped"
    rows = format_leaks(
        [
            compare(honest, (0.8, 0.6), ({}, {})),
            compare(leaky, (0.5, 0.1), ({swapped: 4, grader: 2}, {grader: 3})),
        ]
    ).splitlines()
    assert rows[-2] == "| no leak | 0.800 | 0.700 | 0 of 2 |  |  |"
    first = f"`{grader}` 2, in step 2 to 3"
    assert rows[-1] == f"| one row in three | 0.800 | 0.300 | 2 of 2 | {first} | 0.20 to 0.30 |"
