# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from jaxmoe.study import Contender, ResultsStore, format_comparisons, run_study


class Runs:
    """A run whose result is known, which counts how often it is called."""

    def __init__(self):
        self.calls = []

    def __call__(self, contender, rate, seed):
        self.calls.append((contender.name, rate, seed))
        gain = {"baseline": 0.0, "better": 0.1}[contender.name]
        reward = 0.0 if rate in (None, 2e-3) else -0.5
        return {"accuracy": 0.5 + 0.1 * seed + gain + reward + 0.001 * (seed % 2)}


BASELINE, BETTER = Contender("baseline"), Contender("better", ("loss.epochs=2",), (1e-3, 2e-3))


def test_a_contender_is_compared_at_its_best_rate(tmp_path):
    run = Runs()
    store = ResultsStore(tmp_path / "results.json")
    study = {"name": "s", "store": store, "seeds": 3, "measure": "accuracy"}
    baseline, better = run_study([BASELINE, BETTER], run, **study)
    assert baseline.difference is None and better.rate == 2e-3
    assert better.difference.mean == pytest.approx(0.1)
    assert better.difference.low == pytest.approx(0.1)
    # three seeds of the baseline, one seed of the worse rate, three of the better one
    assert len(run.calls) == 7
    table = format_comparisons([baseline, better])
    assert "| better | 0.002 | 0.7 | +0.1 (+0.1 to +0.1) |" in table


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
    assert len(run.calls) == len(set(run.calls)) == 7


def test_another_setting_or_study_is_another_run(tmp_path):
    run, store = Runs(), ResultsStore(tmp_path / "results.json")
    for name, settings in (("10 steps", ()), ("10 steps", ("loss.epochs=2",)), ("20 steps", ())):
        contenders = [Contender("baseline", settings)]
        run_study(contenders, run, name=name, store=store, seeds=2, measure="accuracy")
    assert len(run.calls) == 6


def test_a_rate_that_diverges_is_not_chosen_silently(tmp_path):
    def run(contender, rate, seed):
        return {"accuracy": float("nan") if rate == 1.0 else 0.5}

    study = {"name": "s", "store": ResultsStore(tmp_path / "r.json"), "seeds": 2}
    contenders = [Contender("two rates", rates=(0.1, 1.0))]
    with pytest.raises(ValueError, match="must be finite, got nan for .*rate 1.0.*Leave out"):
        run_study(contenders, run, measure="accuracy", **study)


@pytest.mark.parametrize(
    "contenders, changes, message",
    [
        ([BASELINE], {"seeds": 1}, "two seeds"),
        ([BASELINE, BASELINE], {}, "different names"),
        ([BASELINE], {"measure": "reward"}, r"must return 'reward', got \['accuracy'\]"),
        ([BASELINE], {"tuning_seeds": 4}, "to choose a rate"),
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
