# SPDX-License-Identifier: Apache-2.0
"""Runs with router.replay=R3 and an engine that reports experts it did not use."""

import sys

import pytest
from scripted import lines

from tests.jaxmoe.commands import TINIEST, arguments, train_here

pytestmark = pytest.mark.slow  # every run compiles an engine and a step
# A file of its own: a run reads the source of an engine and of everything that it imports.
ENGINE = """
from dataclasses import replace

import numpy as np

from jaxmoe.rollout.native_description import describe_native


def zero_answers(r):
    experts = r.routed_experts.copy()
    experts[len(r.prompt.tokens) :] = 0
    return experts


def shift(r):
    return np.roll(r.routed_experts, 1, axis=0)


class FaultyEngine:
    def __init__(self, engine, fault):
        self._engine, self._fault = engine, {"zeros": zero_answers, "shifted": shift}[fault]

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *args, **options):
        rollouts = self._engine.generate(*args, **options)
        return [replace(r, routed_experts=self._fault(r)) for r in rollouts]


def describe(cfg, *, fault):
    native = describe_native(cfg)
    return replace(native, open=lambda *args: FaultyEngine(native.open(*args), fault))
"""
SMALL = (*TINIEST, "steps=1", "eval.every_steps=1", "data.held_out_rows=16", "router.replay=R3")


@pytest.fixture(autouse=True)
def faulty_engine(tmp_path, monkeypatch):
    (tmp_path / "faulty_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("faulty_engine", None)


def run_with(work, fault):
    engine = f"rollout.engine=faulty_engine:describe(fault='{fault}')"
    return train_here(arguments(work, *SMALL, engine))


def test_answers_without_experts_stop_a_replaying_run(tmp_path, capsys):
    assert run_with(tmp_path / "run", "zeros") == 1
    assert "those of 100% of the sampled tokens are unknown" in capsys.readouterr().err
    assert all(row["stage"] != "rl" or not row["step"] for row in lines(tmp_path / "run"))


def test_experts_of_the_token_before_are_an_alert(tmp_path):
    assert run_with(tmp_path / "run", "shifted") == 0
    (row,) = [row for row in lines(tmp_path / "run") if "router/replay_agreement" in row]
    assert row["router/replay_agreement"] < 0.5 and row["router/unknown_experts_frac"] == 0.0
    assert "router/replay_agreement" in str(row["alerts"])
