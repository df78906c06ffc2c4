# SPDX-License-Identifier: Apache-2.0
"""A study of two algorithms on the same seeds: python docs/examples/compare_settings.py

It trains twenty times or more, some four minutes each on two cores: four seeds of each contender,
and for each of them the rates on a seed of its own, until the best one has a lower and a higher
neighbour. A second call goes on where the first was stopped. A function of yours in place of
`train_config` runs anything else.
"""

from functools import partial
from pathlib import Path

from jaxmoe.study import Contender, ResultsStore, format_comparisons, run_study, train_config

CONTENDERS = [
    Contender("GRPO"),
    Contender("RLOO", ("loss.advantages=rloo_advantages",), rates=(1e-4, 3e-4, 9e-4)),
]


def main(folder: Path = Path("runs/study"), run=train_config):
    comparisons = run_study(
        CONTENDERS,
        partial(run, "tiny.py", folder=folder),
        name="tiny.py",
        store=ResultsStore(folder / "results.jsonl"),
        seeds=4,
        measure="eval/accuracy",
    )
    print(format_comparisons(comparisons))


if __name__ == "__main__":
    main()
