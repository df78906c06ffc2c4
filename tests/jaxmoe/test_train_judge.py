# SPDX-License-Identifier: Apache-2.0
"""A run whose judge fails for some answers leaves them out; one whose judge is down stops."""

import numpy as np
import pytest
from judge_server import run_judge
from scripted import Run, Scripted, lines

from jaxmoe.config import ConfigError
from jaxmoe.graders import judge_client
from jaxmoe.run.job import Job


def rewards(url):
    """Every answer gets 0.5 of the other function, which a judge must confirm."""
    judge = f"jaxmoe.graders.judge:score_by_judge(url='{url}', model='m', retries=0)"
    # The judge's process has the test's path, and so this module.
    return f"data.rewards=0.5 * paid_rewards:always + 0.5 * {judge}"


@pytest.fixture(autouse=True)
def paid_rewards(tmp_path, monkeypatch):
    (tmp_path / "paid_rewards.py").write_text("def always(response):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(judge_client, "_FIRST_WAIT_S", 0.01)


def test_answers_without_a_verdict_are_counted_and_have_no_reward(tmp_path, monkeypatch):
    """Half a sum would rank them below their group: the other function pays all of them."""
    seen = []
    make = Job.write_sample_groups

    def look(job, step, collected, batch, stats):
        seen.append(collected.rewards)
        return make(job, step, collected, batch, stats)

    monkeypatch.setattr(Job, "write_sample_groups", look)

    def reply(request):
        return (500, b"") if sum(map(ord, request.answer)) % 3 == 0 else request.yes

    with run_judge(reply) as server:
        Run(tmp_path / "run", Scripted(), changes=(rewards(server.url),))()
    values = np.concatenate(seen)
    assert np.isnan(values).any() and set(values[~np.isnan(values)]) == {1.0}
    logged = lines(tmp_path / "run")[1:]
    failed = [row.get("reward/score_by_judge/http_error/mean", 0.0) for row in logged]
    assert max(failed) > 0 and np.mean(failed) == pytest.approx(np.isnan(values).mean())
    for row, share in zip(logged, failed, strict=True):
        assert row["reward/score_by_judge/down/mean"] == 0.0
        assert row.get("reward/score_by_judge/none_frac", 0.0) == share
        assert row.get("reward/left_out_frac", 0.0) == share


def test_a_judge_that_is_down_stops_the_run_before_anything_is_trained(tmp_path, capfd):
    run = Run(tmp_path / "run", Scripted(), changes=(rewards("http://127.0.0.1:9/v1"),))
    with pytest.raises(ConfigError, match="must score some answers; always, score_by_judge"):
        run()
    assert run.trained == []
    assert "! no verdict of the judge at http://127.0.0.1:9/v1 (down): " in capfd.readouterr().err
