# SPDX-License-Identifier: Apache-2.0
"""Runs with router.replay=R3 and an engine that reports experts it did not use."""

import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from scripted import lines

from jaxmoe import doctor, train
from jaxmoe.rollout.native_description import describe_native

pytestmark = pytest.mark.slow  # half a minute: every run compiles an engine and a step
SMALL = (
    "model.d_model=16", "model.d_expert=24", "warmup.steps=2", "warmup.sequences_per_step=4",
    "rollout.sequences_per_step=8", "rollout.samples_per_prompt=4", "steps=1", "eval.every_steps=1",
    "data.train_rows=16", "data.held_out_rows=16", "rollout.max_gen_batches=1", "router.replay=R3",
)  # fmt: skip


def zero_answers(r):
    experts = r.routed_experts.copy()
    experts[len(r.prompt.tokens) :] = 0
    return experts


FAULTS = {
    "zeros": zero_answers,
    "shifted": lambda r: np.roll(r.routed_experts, 1, axis=0),
}  # fmt: skip


class FaultyEngine:
    """The native engine, whose record of experts has a fault."""

    def __init__(self, engine, fault):
        self._engine, self._fault = engine, FAULTS[fault]

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *args, **options):
        rollouts = self._engine.generate(*args, **options)
        return [replace(r, routed_experts=self._fault(r)) for r in rollouts]


def describe_faulty(cfg, *, fault):
    native = describe_native(cfg)

    def open_faulty(*args):
        return FaultyEngine(native.open(*args), fault)

    return replace(native, open=open_faulty)


def run_command(command, work, fault):
    sets = [*SMALL, f"rollout.engine={__name__}:describe_faulty(fault='{fault}')"]
    words = [word for change in sets for word in ("--set", change)]
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        return command(["--config", "tiny.py", "--workdir", str(work), *words])


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_a_run_stops_before_it_trains_on_answers_without_experts(tmp_path, capsys):
    assert run_command(train.main, tmp_path / "run", "zeros") == 1
    assert "those of 100% of the sampled tokens are unknown" in capsys.readouterr().err
    assert all(row["stage"] != "rl" or not row["step"] for row in lines(tmp_path / "run"))


@pytest.mark.extended  # it compiles the doctor's recomputations
def test_the_doctor_names_the_experts_of_the_token_before(tmp_path, capsys):
    assert run_command(doctor.main, tmp_path / "run", "shifted") == 1
    assert "they are those of the token before it" in " ".join(capsys.readouterr().out.split())
