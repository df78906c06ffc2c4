# SPDX-License-Identifier: Apache-2.0
"""The codes at the start of RL are kept in the run folder, and a resume compares with them."""

import numpy as np
import pytest

from jaxmoe.config_file import load_config, override
from jaxmoe.run.start_codes import METRIC, NAME, StartCodes
from tests.jaxmoe.random_weights import random_weights


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["mxfp4", "mxfp4_rollout"])
def test_a_resumed_run_compares_with_the_first_start(tmp_path, experts):
    cfg = override(load_config("tiny_mxfp4.py"), f"workdir={tmp_path}", f"quant.experts={experts}")
    first, other = (random_weights(cfg.model, seed) for seed in range(2))
    assert StartCodes(cfg, first, 0, None).measure(first) == {METRIC: 0.0}
    resumed = StartCodes(cfg, other, 3, None)
    assert resumed.measure(first) == {METRIC: 0.0}
    assert 0.5 < resumed.measure(other)[METRIC] < 1
    # A run that begins anew in the folder has a start of its own.
    assert StartCodes(cfg, other, 0, None).measure(other) == {METRIC: 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["scale=least_error", "rounding=stochastic"])
def test_a_changed_rule_counts_as_no_movement(tmp_path, capsys, rule):
    cfg = override(load_config("tiny_mxfp4.py"), f"workdir={tmp_path}")
    params, other = (random_weights(cfg.model, seed) for seed in range(2))
    StartCodes(cfg, params, 0, None)
    changed = override(cfg, f"quant.{rule}")
    assert StartCodes(changed, params, 3, None).measure(params) == {METRIC: 0.0}
    (line,) = capsys.readouterr().err.splitlines()
    assert rule.partition("=")[2] in line and "were ocp, nearest" in line and "step 3" in line
    # Resumed again by these rules, it goes on from there, without a word.
    assert StartCodes(changed, other, 4, None).measure(params) == {METRIC: 0.0}
    assert StartCodes(changed, other, 4, None).measure(other)[METRIC] > 0.5
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("model", [True, False])
def test_codes_of_another_model_are_named_and_uncompared(tmp_path, capsys, model):
    cfg = override(load_config("tiny_mxfp4.py"), f"workdir={tmp_path}")
    params, file = random_weights(cfg.model, 0), tmp_path / NAME
    if model:
        other = override(cfg, "model.n_experts=4")
        StartCodes(other, random_weights(other.model, 0), 0, None)
    else:
        with file.open("wb") as array:
            np.save(array, np.zeros(3))
    assert StartCodes(cfg, params, 3, None).measure(params) == {METRIC: 0.0}
    (line,) = capsys.readouterr().err.splitlines()
    reason = "has codes of another model" if model else "cannot be read (TypeError)"
    assert line == f"! {METRIC} now counts from step 3: {file} {reason}"


@pytest.mark.parametrize("damage", ["cut off", "empty", "text"])
def test_a_damaged_file_ends_no_resume(tmp_path, capsys, damage):
    cfg = override(load_config("tiny_mxfp4.py"), f"workdir={tmp_path}")
    params = random_weights(cfg.model, 0)
    StartCodes(cfg, params, 0, None)
    file = tmp_path / NAME
    file.write_bytes({"cut off": file.read_bytes()[:-99], "empty": b"", "text": b"codes"}[damage])
    assert StartCodes(cfg, params, 3, None).measure(params) == {METRIC: 0.0}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"! {METRIC} now counts from step 3: {file} cannot be read (")


def test_a_dense_run_compares_from_its_first_rounding(tmp_path):
    cfg = override(load_config("tiny_mxfp4.py"), f"workdir={tmp_path}")
    params = random_weights(cfg.model, 0)
    assert StartCodes(cfg, params, 7, None).measure(params) == {METRIC: 0.0}


def test_a_dense_run_has_neither_file_nor_metric(tmp_path):
    cfg = override(load_config("tiny.py"), f"workdir={tmp_path}")
    params = random_weights(cfg.model, 0)
    assert StartCodes(cfg, params, 0, None).measure(params) == {}
    assert not (tmp_path / NAME).exists()
