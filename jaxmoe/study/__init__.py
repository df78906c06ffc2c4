# SPDX-License-Identifier: Apache-2.0
"""Comparisons of training settings over seeds: paired differences, intervals, resumable.

    from jaxmoe.study import Contender, ResultsStore, format_comparisons, run_study, train_config

docs/examples/compare_settings.py is an example. `python -m studies` runs the studies that
docs/results/ shows. Next: jaxmoe/study/contenders.py.
"""

from jaxmoe.study.contenders import Comparison, Contender, format_comparisons, run_study
from jaxmoe.study.paired import (
    Interval,
    correct_p_values,
    paired_difference,
    paired_p_value,
    paired_ratio,
)
from jaxmoe.study.results_store import ResultsStore
from jaxmoe.study.train_config import train_config

__all__ = [
    "Comparison",
    "Contender",
    "Interval",
    "ResultsStore",
    "correct_p_values",
    "format_comparisons",
    "paired_difference",
    "paired_p_value",
    "paired_ratio",
    "run_study",
    "train_config",
]
