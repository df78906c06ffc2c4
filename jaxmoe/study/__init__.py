# SPDX-License-Identifier: Apache-2.0
"""Comparisons of training settings over seeds: paired differences, intervals, resumable.

    from jaxmoe.study import Contender, ResultsStore, format_comparisons, run_study, train_config

docs/examples/compare_settings.py is an example. `python -m studies` runs the studies that
docs/results/ shows. Next: jaxmoe/study/contenders.py.
"""

from jaxmoe.study.contenders import ChosenRate, Comparison, Contender, run_study
from jaxmoe.study.families import (
    FamilyChances,
    correct_discoveries,
    correct_p_values,
    simulate_family,
)
from jaxmoe.study.paired import (
    Interval,
    MedianInterval,
    paired_difference,
    paired_median,
    paired_p_value,
    paired_ratio,
    sign_flip_p_value,
)
from jaxmoe.study.results_store import ResultsStore
from jaxmoe.study.tables import Column, format_comparisons
from jaxmoe.study.train_config import train_config

__all__ = [
    "ChosenRate",
    "Column",
    "Comparison",
    "Contender",
    "FamilyChances",
    "Interval",
    "MedianInterval",
    "ResultsStore",
    "correct_discoveries",
    "correct_p_values",
    "format_comparisons",
    "paired_difference",
    "paired_median",
    "paired_p_value",
    "paired_ratio",
    "run_study",
    "sign_flip_p_value",
    "simulate_family",
    "train_config",
]
