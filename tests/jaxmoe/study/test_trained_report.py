# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of the trained study: differences, intervals that leave out 0, and cost."""

from jaxmoe.study.contenders import Comparison, Contender
from jaxmoe.study.paired import paired_difference
from jaxmoe.study.trained_report import cost_ratio, format_trained_tables, plot_trained


def comparison(name, values, seconds, baseline=None):
    metrics = [
        {"start": 0.4, "end": x, "grad_norm_p99": 2.0, "ratio_max": 7.0 + x, "step_cpu_s": s}
        for x, s in zip(values, seconds, strict=True)
    ]
    difference = None if baseline is None else paired_difference(values, baseline)
    return Comparison(Contender(name), 5e-4, values, difference, metrics)


BASE = [0.2, 0.3, 0.25]
NOTHING = comparison("nothing", BASE, [0.1, 0.2, 0.4])
BETTER = comparison("better", [0.5, 0.59, 0.56], [0.2, 0.4, 0.7], BASE)
SAME = comparison("same", [0.2, 0.31, 0.24], [0.1, 0.2, 0.4], BASE)


def test_the_overview_has_a_row_a_remedy_and_marks_intervals_without_zero():
    text = format_trained_tables({"a": [NOTHING, BETTER, SAME], "b": [NOTHING, BETTER]})
    rows = {line.split("|")[1].strip(): line for line in text.splitlines()[:5]}
    assert rows["nothing"] == "| nothing | 0.250 | 0.250 | 1.00x |"
    assert rows["better"].count("**+0.300 (") == 2 and rows["better"].endswith("| 2.00x |")
    assert "**" not in rows["same"] and rows["same"].endswith("|  | 1.00x |")
    assert "### b" in text and "| better | 0.0005 | 0.40 | 0.550 | 0.50 0.59 0.56 |" in text


def test_the_cost_is_the_median_of_paired_ratios():
    assert cost_ratio(BETTER, NOTHING) == 2.0


def test_the_figure_is_written(tmp_path):
    plot_trained({"a": [NOTHING, BETTER, SAME]}, tmp_path / "router.png")
    assert (tmp_path / "router.png").read_bytes().startswith(b"\x89PNG")
