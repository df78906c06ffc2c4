# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from jaxmoe.study import (
    ChosenRate,
    Contender,
    ResultsStore,
    correct_discoveries,
    correct_p_values,
    format_comparisons,
    run_study,
)
from jaxmoe.study.contenders import FIRST_TUNING_SEED, bracket_rate, count_runs


class Runs:
    """A run whose result is known, which counts how often it is called."""

    def __init__(self):
        self.calls = []

    def __call__(self, contender, rate, seed):
        self.calls.append((contender.name, rate, seed))
        gain = {"baseline": 0.0, "better": 0.1}[contender.name]
        reward = 0.0 if rate in (None, 2e-3) else -0.5
        return {"accuracy": 0.5 + 0.1 * seed + gain + reward + 0.001 * (seed % 2)}


BASELINE = Contender("baseline")
BETTER = Contender("better", ("loss.epochs=2",), (1e-3, 2e-3, 4e-3))


def test_a_contender_is_compared_at_its_best_rate(tmp_path):
    run = Runs()
    store = ResultsStore(tmp_path / "results.jsonl")
    lines = []
    study = {"name": "s", "store": store, "seeds": 3, "measure": "accuracy", "report": lines.append}
    baseline, better = run_study([BASELINE, BETTER], run, **study)
    assert baseline.difference is None and baseline.chosen == 3 * (ChosenRate(None),)
    assert better.chosen == 3 * (ChosenRate(2e-3),)
    assert better.difference.mean == pytest.approx(0.1)
    assert better.difference.low == pytest.approx(0.1)
    # three seeds of each, and each rate on three seeds that are not compared
    assert [seed for name, _, seed in run.calls if name == "baseline"] == [0, 1, 2]
    tuned = [(rate, seed) for name, rate, seed in run.calls[3:12]]
    first = FIRST_TUNING_SEED
    assert tuned == [(rate, first + n) for n in range(3) for rate in BETTER.rates]
    assert len(run.calls) == len(lines) == 15
    assert lines[-1] == "15 of about 18: better, rate 0.002, seed 2: accuracy 0.8"
    table = format_comparisons([baseline, better])
    assert "| better | 0.002 | 0.7 | **+0.1 (+0.1 to +0.1)** | +0.1 (+0.1 to +0.1) |" in table


def test_each_counted_seed_has_its_own_choice():
    """The best rate of a tuning seed depends on that seed."""

    def run(contender, rate, seed):
        best = (1e-3, 2e-3, 4e-3)[seed % FIRST_TUNING_SEED % 3]
        return {"accuracy": seed % FIRST_TUNING_SEED - abs(math.log(rate / best))}

    study = {"name": "s", "store": ResultsStore(), "seeds": 6, "measure": "accuracy"}
    contenders = [Contender("c", rates=(1e-3, 2e-3))]
    (comparison,) = run_study(contenders, run, **study)
    assert [choice.rate for choice in comparison.chosen] == 2 * [1e-3, 2e-3, 4e-3]
    np.testing.assert_allclose(comparison.values, range(6))
    assert "| c | 0.002 (0.001 to 0.004) |" in format_comparisons([comparison])
    # fewer tuning seeds are used in turn
    (comparison,) = run_study(contenders, run, tuning_seeds=2, **study)
    assert [choice.rate for choice in comparison.chosen] == [1e-3, 2e-3]
    distances = [round(abs(n - value) / math.log(2)) for n, value in enumerate(comparison.values)]
    assert distances == [0, 0, 2, 1, 1, 1]


def test_a_repeated_study_shares_no_seed(tmp_path):
    study = {"name": "s", "store": ResultsStore(), "seeds": 3, "measure": "accuracy"}
    first, again = Runs(), Runs()
    run_study([BASELINE, BETTER], first, **study)
    _, better = run_study([BASELINE, BETTER], again, first_seed=3, **study)
    assert {seed for *_, seed in again.calls} == {
        3,
        4,
        5,
        *(FIRST_TUNING_SEED + n for n in (3, 4, 5)),
    }
    assert not {seed for *_, seed in first.calls} & {seed for *_, seed in again.calls}
    assert better.values == pytest.approx([0.901, 1.0, 1.101])


@pytest.mark.parametrize(
    ("optimum", "tried", "expected"),
    [
        (4.0, [1.0, 2.0, 4.0, 8.0], ChosenRate(4.0)),
        (0.25, [0.125, 0.25, 0.5, 1.0, 2.0], ChosenRate(0.25)),
        (1e6, [1.0, 2.0, 4.0, 8.0, 16.0], ChosenRate(16.0, is_inside=False)),
    ],
)
def test_a_grid_grows_around_the_best_rate(optimum, tried, expected):
    measured = {}

    def measure(rate):
        assert rate not in measured
        return measured.setdefault(rate, -abs(math.log(rate / optimum)))

    assert bracket_rate(measure, (1.0, 2.0), 5) == expected
    assert sorted(measured) == tried


def test_a_rate_without_neighbour_is_marked(tmp_path):
    def run(contender, rate, seed):
        return {"accuracy": 1.0 if rate is None else rate}

    contenders = [BASELINE, Contender("growing", rates=(0.1, 0.2))]
    study = {"name": "s", "store": ResultsStore(), "seeds": 2}
    comparisons = run_study(contenders, run, measure="accuracy", max_rates=4, **study)
    assert comparisons[1].chosen == 2 * (ChosenRate(0.8, is_inside=False),)
    text = format_comparisons(comparisons)
    assert (
        "| growing | 0.8* |" in text and "*: 2 of 4 choices are the lowest or the highest" in text
    )
    (single,) = run_study([Contender("c", rates=(0.1,))], run, measure="accuracy", **study)
    assert "| c | 0.1* |" in format_comparisons([single])


def test_p_is_corrected_over_all_contenders(tmp_path):
    rng = np.random.default_rng(0)

    def run(contender, rate, seed):
        return {"accuracy": rng.normal(0.3 * int(contender.name), 0.1)}

    contenders = [Contender(str(n)) for n in range(4)]
    study = {"name": "s", "store": ResultsStore(), "seeds": 5}
    first, *others = run_study(contenders, run, measure="accuracy", **study)
    assert first.p_value is None and first.corrected_p_value is None
    p_values = [c.p_value for c in others]
    assert [c.corrected_p_value for c in others] == list(correct_p_values(p_values))
    assert [c.discovery_p_value for c in others] == list(correct_discoveries(p_values))
    assert f"| {others[2].corrected_p_value:.2g} |" in format_comparisons([first, *others])


def test_an_interrupted_study_continues(tmp_path):
    path, run = tmp_path / "results.jsonl", Runs()

    def interrupted(contender, rate, seed):
        if len(run.calls) == 4:
            raise KeyboardInterrupt
        return run(contender, rate, seed)

    study = {"name": "s", "seeds": 3, "measure": "accuracy"}
    with pytest.raises(KeyboardInterrupt):
        run_study([BASELINE, BETTER], interrupted, store=ResultsStore(path), **study)
    assert len(path.read_text().splitlines()) == 4
    comparisons = run_study([BASELINE, BETTER], run, store=ResultsStore(path), **study)
    assert len(run.calls) == len(set(run.calls)) == 15
    repeated = run_study([BASELINE, BETTER], run, store=ResultsStore(path), **study)
    assert len(run.calls) == 15 and repeated == comparisons


def test_runs_are_estimated_with_four_rates():
    single = Contender("single", rates=(0.1,))
    assert count_runs([BASELINE, single, BETTER], 8, 8) == 8 + 8 + 4 * 8 + 8
    five = Contender("five", rates=(0.1, 0.2, 0.4, 0.8, 1.6))
    assert count_runs([five], 8, 2) == 6 * 2 + 8


def test_another_setting_or_study_is_another_run(tmp_path):
    run, store = Runs(), ResultsStore(tmp_path / "results.jsonl")
    for name, settings in (("10 steps", ()), ("10 steps", ("loss.epochs=2",)), ("20 steps", ())):
        contenders = [Contender("baseline", settings)]
        run_study(contenders, run, name=name, store=store, seeds=2, measure="accuracy")
    assert len(run.calls) == 6


def test_a_rate_that_diverges_is_not_chosen():
    def run(contender, rate, seed):
        return {"accuracy": float("nan") if rate is None or rate > 0.1 else rate}

    study = {"name": "s", "store": ResultsStore(), "seeds": 2}
    (comparison,) = run_study(
        [Contender("two rates", rates=(0.1, 0.4))], run, measure="accuracy", max_rates=3, **study
    )
    assert comparison.chosen == 2 * (ChosenRate(0.1),)
    with pytest.raises(ValueError, match=r"must be finite, got \[nan, nan\] of no rate.*Leave out"):
        run_study([Contender("no rate")], run, measure="accuracy", **study)


@pytest.mark.parametrize(
    "contenders, changes, message",
    [
        ([BASELINE], {"seeds": 1}, "two seeds"),
        ([BASELINE, BASELINE], {}, "different names"),
        ([BASELINE], {"measure": "reward"}, r"must return 'reward', got \['accuracy'\]"),
        ([BASELINE], {"tuning_seeds": 0}, "to choose rates"),
        ([BASELINE], {"tuning_seeds": 3}, "to choose rates"),
        ([BASELINE], {"first_seed": -1}, "from 0 to 999"),
        ([BASELINE], {"first_seed": 999}, "from 0 to 999"),
        ([Contender("c", rates=(2.0, 1.0))], {}, "rates of c must be above 0 and ascend"),
    ],
)
def test_a_study_that_cannot_work_is_refused(tmp_path, contenders, changes, message):
    store = ResultsStore()
    study = {"name": "s", "store": store, "seeds": 2, "measure": "accuracy"}
    with pytest.raises(ValueError, match=message):
        run_study(contenders, Runs(), **study | changes)
