# SPDX-License-Identifier: Apache-2.0
import json
import math

import numpy as np
import pytest

from jaxmoe.study import (
    Contender,
    ResultsStore,
    correct_p_values,
    format_comparisons,
    run_study,
)
from jaxmoe.study.contenders import FIRST_TUNING_SEED, bracket_rate


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
    store = ResultsStore(tmp_path / "results.json")
    study = {"name": "s", "store": store, "seeds": 3, "measure": "accuracy"}
    baseline, better = run_study([BASELINE, BETTER], run, **study)
    assert baseline.difference is None and better.rate == 2e-3 and better.is_bracketed
    assert better.difference.mean == pytest.approx(0.1)
    assert better.difference.low == pytest.approx(0.1)
    # three seeds of each, and each rate on a seed that is not compared
    assert [seed for name, _, seed in run.calls if name == "baseline"] == [0, 1, 2]
    tuned = [(rate, seed) for name, rate, seed in run.calls[3:6]]
    assert tuned == [(rate, FIRST_TUNING_SEED) for rate in BETTER.rates]
    assert len(run.calls) == 9
    table = format_comparisons([baseline, better])
    assert "| better | 0.002 | 0.7 | +0.1 (+0.1 to +0.1) |" in table


@pytest.mark.parametrize(
    ("optimum", "tried", "expected"),
    [
        (4.0, [1.0, 2.0, 4.0, 8.0], (4.0, True)),
        (0.25, [0.125, 0.25, 0.5, 1.0, 2.0], (0.25, True)),
        (1e6, [1.0, 2.0, 4.0, 8.0, 16.0], (16.0, False)),
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
    study = {"name": "s", "store": ResultsStore(tmp_path / "r.json"), "seeds": 2}
    comparisons = run_study(contenders, run, measure="accuracy", max_rates=4, **study)
    assert comparisons[1].rate == 0.8 and not comparisons[1].is_bracketed
    assert "| growing | 0.8* |" in format_comparisons(comparisons)
    (single,) = run_study([Contender("c", rates=(0.1,))], run, measure="accuracy", **study)
    assert "| c | 0.1* |" in format_comparisons([single])


def test_p_is_corrected_over_all_contenders(tmp_path):
    rng = np.random.default_rng(0)

    def run(contender, rate, seed):
        return {"accuracy": rng.normal(0.3 * int(contender.name), 0.1)}

    contenders = [Contender(str(n)) for n in range(4)]
    study = {"name": "s", "store": ResultsStore(tmp_path / "r.json"), "seeds": 5}
    first, *others = run_study(contenders, run, measure="accuracy", **study)
    assert first.p_value is None and first.corrected_p_value is None
    assert [c.corrected_p_value for c in others] == correct_p_values([c.p_value for c in others])
    assert f"| {others[2].corrected_p_value:.2g} |" in format_comparisons([first, *others])


def test_an_interrupted_study_continues(tmp_path):
    path, run = tmp_path / "results.json", Runs()

    def interrupted(contender, rate, seed):
        if len(run.calls) == 4:
            raise KeyboardInterrupt
        return run(contender, rate, seed)

    study = {"name": "s", "seeds": 3, "measure": "accuracy"}
    with pytest.raises(KeyboardInterrupt):
        run_study([BASELINE, BETTER], interrupted, store=ResultsStore(path), **study)
    assert len(json.loads(path.read_text())) == 4
    run_study([BASELINE, BETTER], run, store=ResultsStore(path), **study)
    assert len(run.calls) == len(set(run.calls)) == 9


def test_another_setting_or_study_is_another_run(tmp_path):
    run, store = Runs(), ResultsStore(tmp_path / "results.json")
    for name, settings in (("10 steps", ()), ("10 steps", ("loss.epochs=2",)), ("20 steps", ())):
        contenders = [Contender("baseline", settings)]
        run_study(contenders, run, name=name, store=store, seeds=2, measure="accuracy")
    assert len(run.calls) == 6


def test_a_rate_that_diverges_is_not_chosen(tmp_path):
    def run(contender, rate, seed):
        return {"accuracy": float("nan") if rate is None or rate > 0.1 else rate}

    study = {"name": "s", "store": ResultsStore(tmp_path / "r.json"), "seeds": 2}
    (comparison,) = run_study(
        [Contender("two rates", rates=(0.1, 0.4))], run, measure="accuracy", max_rates=3, **study
    )
    assert comparison.rate == 0.1
    with pytest.raises(ValueError, match=r"must be finite, got \[nan, nan\] of no rate.*Leave out"):
        run_study([Contender("no rate")], run, measure="accuracy", **study)


@pytest.mark.parametrize(
    "contenders, changes, message",
    [
        ([BASELINE], {"seeds": 1}, "two seeds"),
        ([BASELINE, BASELINE], {}, "different names"),
        ([BASELINE], {"measure": "reward"}, r"must return 'reward', got \['accuracy'\]"),
        ([BASELINE], {"tuning_seeds": 0}, "to choose a rate"),
        ([Contender("c", rates=(2.0, 1.0))], {}, "rates of c must be above 0 and ascend"),
    ],
)
def test_a_study_that_cannot_work_is_refused(tmp_path, contenders, changes, message):
    store = ResultsStore(tmp_path / "r.json")
    study = {"name": "s", "store": store, "seeds": 2, "measure": "accuracy"}
    with pytest.raises(ValueError, match=message):
        run_study(contenders, Runs(), **study | changes)


def test_a_damaged_store_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"a": ')
    with pytest.raises(ValueError, match="Move it away"):
        ResultsStore(path)
