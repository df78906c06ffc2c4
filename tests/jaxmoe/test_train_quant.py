# SPDX-License-Identifier: Apache-2.0
"""Runs with quant.experts=mxfp4: sampled, trained and exported are the same four-bit experts."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import load_params
from jaxmoe.checkpoint.run import restore_policy
from jaxmoe.checkpoint.store import find_latest_step
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.eval import main as eval_main
from jaxmoe.export import main as export_main
from jaxmoe.model.rounded import MATRICES, round_experts
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.run.parts import make_parts
from jaxmoe.run.programs import supervised_program
from jaxmoe.train import open_job, warm_start
from tests.jaxmoe.commands import arguments, finish, train_here

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "data.train_rows=64 data.held_out_rows=8 warmup.steps=3 warmup.sequences_per_step=16 "
    "rollout.sequences_per_step=16 rollout.max_gen_batches=1 eval.every_steps=2 "
    "loss.entropy_coef=0.01 save.every_steps=1"
).split()


def typed(work, *changes):
    return arguments(work, *SETTINGS, *changes, config="tiny_mxfp4.py")


def run(work, *changes):
    return train_here(typed(work, *changes))


def rl_rows(work):
    return [r for r in read_metrics(work / "metrics.jsonl") if "policy/ratio_max" in r]


@pytest.mark.slow
def test_trainer_engine_and_export_have_equal_bits(tmp_path, capsys):
    """Resumed after its first step: a resume packs the masters again."""
    work, out = tmp_path / "run", tmp_path / "export"
    invariant = "model.numerics=invariant"
    assert run(work, invariant, "steps=1") == run(work, invariant, "steps=2") == 0
    rows = rl_rows(work)
    assert [r["train_rollout_logprob_abs_diff_max"] for r in rows] == [0.0, 0.0]
    for row in rows:
        assert row["grad/norm"] > 0 and 0 < row["quant/moved_frac"] < 0.5
        assert 0 < row["quant/saturated_frac"] < 0.1 and 0.05 < row["quant/relative_error"] < 0.2
    assert eval_main(typed(work, invariant, "steps=2")) == 0
    capsys.readouterr()
    assert export_main([*typed(work, invariant, "steps=2"), "--out", str(out)]) == 0
    assert "max 0 nats; other experts in 0.00% of (token, layer)" in capsys.readouterr().out

    cfg = override(load_config("tiny_mxfp4.py"), *SETTINGS, invariant, "steps=2", f"workdir={work}")
    trained = round_experts(restore_policy(work, cfg, None, contents={}).params)
    exported = load_params(out, cfg.model, experts="packed")
    for kind in ("sliding", "full"):
        for name in MATRICES:
            for part, expected in zip(
                exported["layers"][kind][name], trained["layers"][kind][name], strict=True
            ):
                np.testing.assert_array_equal(part, np.asarray(expected))


@pytest.mark.slow
def test_a_warm_start_that_breaks_experts_is_unsaved(tmp_path, standard_promotion):
    """The expert breaks in the last step, so that no loss is computed of it."""
    cfg = override(
        load_config("tiny_mxfp4.py"),
        *SETTINGS,
        "warmup.steps=2",
        "model.d_model=64",
        "model.d_expert=64",
        f"workdir={tmp_path}",
    )

    def breaking_program(*args):
        program = supervised_program(*args)

        def take_step(state, batch):
            state, metrics = program.fn(state, batch)
            full = state.policy["layers"]["full"]
            bad = full["w_down"].at[0, 2, 5, 3].set(jnp.where(state.step == 2, jnp.nan, 0.0))
            layers = state.policy["layers"] | {"full": full | {"w_down": bad}}
            params = replace(state.params, policy=state.policy | {"layers": layers})
            return replace(state, params=params), metrics

        return program._replace(fn=take_step)

    with open_job(cfg, replace(make_parts(cfg), supervised_program=breaking_program)) as job:
        with pytest.raises(ConfigError) as error:
            warm_start(job)
    place = "step 2: experts must be finite; the step broke layer 1, w_down, expert 2 (1 such"
    assert place in str(error.value) and "--set warmup.lr=0.0001" in str(error.value)
    assert find_latest_step(tmp_path / "checkpoints") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["quant.scale=least_error", "quant.rounding=stochastic"])
def test_other_rounding_rules_give_equal_bits(tmp_path, rule):
    assert run(tmp_path, "model.numerics=invariant", "steps=2", rule) == 0
    for row in rl_rows(tmp_path):
        assert row["train_rollout_logprob_abs_diff_max"] == 0.0
        assert row["quant/moved_since_start_frac"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        "optim.microbatches=2 loss.minibatches=2 loss.old_logp=recomputed loss.kl_coef=0.01",
        "critic.backbone=own loss.advantages=gae loss.old_logp=recomputed loss.epochs=2",
        "optim.param_dtype=bfloat16 model.dtype=bfloat16",
    ],
)
def test_the_engine_gap_is_that_of_dense_weights(tmp_path, changes):
    changes = ["steps=2", *changes.split()]
    assert run(tmp_path / "rounded", *changes) == 0
    assert run(tmp_path / "dense", "quant.experts=none", *changes) == 0
    gaps = [
        max(r["train_rollout_logprob_abs_diff_max"] for r in rl_rows(tmp_path / name))
        for name in ("rounded", "dense")
    ]
    assert gaps[0] <= 3 * gaps[1] + 1e-6


@pytest.mark.slow
def test_a_stale_engines_gap_is_of_moved_codes(tmp_path):
    ahead = "rollout.max_staleness=1", "loss.rollout_correction=token_is(high=2.0)"
    assert run(tmp_path, "steps=3", *ahead) == 0
    rows = rl_rows(tmp_path)
    stale = [r["staleness/max"] for r in rows]
    gaps = [r["train_rollout_logprob_abs_diff_max"] for r in rows]
    assert stale[0] == 0 and max(stale) == 1
    assert all((gap > 1e-5) == (age > 0) for age, gap in zip(stale, gaps, strict=True))


@pytest.mark.slow
def test_a_dense_run_may_resume_quantised_and_back(tmp_path, capsys):
    assert run(tmp_path, "steps=1", "quant.experts=none") == 0
    capsys.readouterr()
    for step, (new, old) in enumerate((("mxfp4", "none"), ("none", "mxfp4")), 2):
        assert run(tmp_path, f"steps={step}", f"quant.experts={new}") == 0
        out = capsys.readouterr().out
        (line,) = [x for x in out.splitlines() if x.startswith("resuming")]
        assert f"quant.experts={new} (was {old})" in line
    rows = rl_rows(tmp_path)
    assert ["quant/moved_frac" in r for r in rows] == [False, True, False]
    assert max(r["train_rollout_logprob_abs_diff_max"] for r in rows) < 1e-5


KILLED = """
import os, signal, sys
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.train import main

load, syncs = NativeEngine.load, []

def load_or_die(engine, params, version):
    syncs.append(version)
    if str(version) == sys.argv[1]:
        # The packed tensors are there, and the engine has half of them.
        engine._loaded = engine._read(params), version - 1
        os.kill(os.getpid(), signal.SIGKILL)
    load(engine, params, version)

NativeEngine.load = load_or_die
sys.exit(main(sys.argv[2:]))
"""


def run_killed(work, version):
    """The command in a process that is killed while the engine loads this version's weights."""
    return finish([sys.executable, "-c", KILLED, str(version), *typed(work, "steps=3")])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_while_loading_packed_tensors_resumes(tmp_path):
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    code, _, err = run_killed(uninterrupted, -1)
    assert code == 0, err
    for version in (1, 2):
        assert run_killed(killed, version)[0] == -signal.SIGKILL
    code, out, err = run_killed(killed, -1)
    assert code == 0 and "resuming" in out, err
    for a, b in zip(rl_rows(uninterrupted), rl_rows(killed), strict=True):
        timed = {name for name in a if name.startswith("time/") or "per_s" in name}
        assert {k: a[k] for k in a.keys() - timed} == {k: b[k] for k in b.keys() - timed}


@pytest.mark.parametrize(
    "changes, text",
    [
        (["lora.attention_rank=4"], "with LoRA the experts do not: its base has four bits already"),
        (
            ["quant.experts=none", "quant.rounding=stochastic"],
            "rounding=stochastic are set. Try --set quant.experts=mxfp4, or --set "
            "quant.experts=none --set quant.scale=ocp --set quant.rounding=nearest.",
        ),
        (
            ["rollout.engine=vllm", "rollout.vllm.args=--seed 1 --dtype half"],
            "values reach 6 · 2^125; got --dtype half in rollout.vllm.args. Leave it out",
        ),
        (
            ["quant.experts=mxfp4_rollout", "model.numerics=invariant"],
            "rounds the engine's alone. Try --set quant.experts=mxfp4, or --set model.numerics=",
        ),
        (["model.d_model=96"], "model.d_model to be a multiple of 64, got model.d_model=96"),
    ],
)
def test_settings_that_cannot_be_rounded_are_refused(changes, text):
    with pytest.raises(ConfigError) as error:
        override(load_config("tiny_mxfp4.py"), *changes)
    assert text in str(error.value) and "\n" not in str(error.value)
