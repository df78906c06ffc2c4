# SPDX-License-Identifier: Apache-2.0
"""Studies of agents over seeds: ways to compute the same thing, and a tool that leaks the answer.

The contenders of a study have the rate of their config: they are one algorithm, with other sums or
other tools. Next: studies/config_study.py runs them.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxmoe.study.contenders import Comparison, Contender
from studies.config_study import ConfigStudy

UNSHARED = "optim.share_prompts=off"
HACK = "jaxmoe.configs.tiny_hack"
EARNED = "eval/reward/score_work/mean"

AGENTS = ConfigStudy(
    "agents",
    "shared prompts and invariant numerics for agents, over seeds",
    "tiny_turns.py",
    (
        Contender("prompts one by one", (UNSHARED,)),
        Contender("shared prompts", ("optim.share_prompts=on",)),
        Contender("invariant numerics", (UNSHARED, "model.numerics=invariant")),
    ),
    settings=("eval.every_steps=60",),
    run_seconds=110.0,
)


def leaky_tool(share: float) -> str:
    """The setting of a tool whose sandbox has the stored answer in this share of the rows."""
    return f"data.tools={HACK}:make_leaky_tool(leak='environment', share={share:.2f})"


def format_leaks(comparisons: Sequence[Comparison]) -> str:
    """Return a table: who earned the rewards, and which alert came first."""
    titles = ("", "paid", "earned", "runs with an alert", "the first one", "reward then")
    lines = [
        "Means over the seeds, by `python -m studies leaks`. Paid: held-out answers that are "
        "right; earned: those whose programs all compute what was asked for.",
        "",
        f"| {' | '.join(titles)} |".replace("|  |", "| |"),
        "|" + "---|" * len(titles),
    ]
    for c in comparisons:
        alerted = [run for run in c.metrics if run["alerts"]]
        first = Counter(min(run["alerts"], key=run["alerts"].get) for run in alerted)
        steps = [min(run["alerts"].values()) for run in alerted]
        rewards = [run["rewards"][step - 1][2] for run, step in zip(alerted, steps, strict=True)]
        cells = (
            c.contender.name,
            f"{np.mean(c.values):.3f}",
            f"{np.mean([run['evaluated'][EARNED] for run in c.metrics]):.3f}",
            f"{len(alerted)} of {len(c.metrics)}",
            ", ".join(f"`{name}` {count}" for name, count in first.most_common())
            + (f", in step {min(steps)} to {max(steps)}" if steps else ""),
            f"{min(rewards):.2f} to {max(rewards):.2f}" if rewards else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


LEAKS = ConfigStudy(
    "leaks",
    "a tool that leaks the answer in one row of three, over seeds",
    "tiny_hack.py",
    (
        Contender("no leak", (leaky_tool(0.0),)),
        Contender("one row in three", (leaky_tool(1 / 3),)),
        Contender("every row", (leaky_tool(1.0),)),
    ),
    settings=(
        # score_work pays nothing here: it is the share of answers that are earned.
        f"data.rewards={HACK}:score_equal + 0 * {HACK}:score_work",
        f"warmup.demonstrations={HACK}:demonstrate(trick='environment', share=0.3)",
        "steps=16",
        "eval.every_steps=16",
        "save.every_steps=16",
    ),
    run_seconds=150.0,
    format_more=format_leaks,
)
