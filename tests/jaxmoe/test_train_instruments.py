# SPDX-License-Identifier: Apache-2.0
"""A run with instruments of the router: its files, and a resume."""

import numpy as np
import pytest
from scripted import lines

from jaxmoe.config_file import load_config
from jaxmoe.observe.metrics import read_samples
from tests.jaxmoe.commands import TINIEST, arguments, train_here

SMALL = (*TINIEST, "steps=2", "eval.every_steps=2", "save.every_steps=1", "loss.minibatches=2")
SCORED = ("loss.old_logp=recomputed", "rollout.compare_experts=True")


def run(work, *changes):
    assert train_here(arguments(work, *SMALL, *SCORED, *changes)) == 0
    return [row for row in lines(work) if row.get("grad/norm") is not None]


@pytest.mark.slow
def test_a_resume_may_turn_instruments_on(tmp_path):
    run(tmp_path / "run", "steps=1")
    assert not (tmp_path / "run/layers.jsonl").exists()
    # A resume may turn instruments on.
    measured = run(tmp_path / "run", "router.instruments=True")
    m = load_config("tiny.py").model
    (layers,) = read_samples(tmp_path / "run/layers.jsonl")
    assert (layers["stage"], layers["step"]) == ("rl", 2)
    for name, values in layers.items():
        if name not in ("stage", "step"):
            assert len(values) == m.n_layers and np.isfinite(values).all()
            assert f"router/{name}" in measured[-1]
    assert (tmp_path / "run/plots/router.png").is_file()
    second = run(tmp_path / "run", "router.instruments=True", "steps=3")
    assert [row["step"] for row in read_samples(tmp_path / "run/layers.jsonl")] == [2, 3]
    assert 0.0 <= second[-1]["router/boundary_mass"] <= 1.0
