# SPDX-License-Identifier: Apache-2.0
"""`--set optim.trainable=…`: the command, its memory, its checkpoints and its resume."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe import train
from jaxmoe.checkpoint.run import initial_params, restore_run
from jaxmoe.config_file import load_config, override
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import stage_shapes
from jaxmoe.run.memory import plan_memory
from jaxmoe.run.programs import warmup_optimizer

ROOT = Path(__file__).parents[2]
NO_ROUTER = "(?!.*router).*"
RUN = {
    "model.d_model": 32,
    "model.d_expert": 24,
    "model.n_experts": 4,
    "data.train_rows": 64,
    "data.held_out_rows": 6,
    "warmup.steps": 10,
    "warmup.sequences_per_step": 8,
    "rollout.sequences_per_step": 8,
    "rollout.samples_per_prompt": 4,
    "steps": 10,
    "eval.every_steps": 10,
    "save.every_steps": 10,
    "loss.kl_coef": 0.1,
    "optim.trainable": NO_ROUTER,
}


def arguments(work, changes):
    sets = [part for k, v in (RUN | changes).items() for part in ("--set", f"{k}={v}")]
    return ["--config", "tiny.py", "--workdir", str(work), *sets]


def run(work, devices, changes):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxmoe.train", *arguments(work, changes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def restore(work):
    """Config and state of the newest checkpoint."""
    settings = (f"{key}={value}" for key, value in RUN.items())
    cfg = override(load_config("tiny.py"), *settings, f"workdir={work}")
    shapes = stage_shapes(cfg, warmup_optimizer(cfg), rl_optimizer(cfg))
    position = restore_run(work, cfg, shapes)
    assert position is not None
    return cfg, position


@pytest.mark.slow  # commands
@pytest.mark.parametrize(
    ("changes", "devices"),
    [({}, 1), ({"optim.moments": "host"}, 1), ({"mesh.fsdp": 2}, 2)],
    ids=["plain", "host moments", "mesh"],
)
def test_a_frozen_router_is_unchanged_after_20_steps_of_the_command(
    tmp_path, capsys, changes, devices
):
    out = run(tmp_path, devices, changes)
    counts = re.search(r"^trains   ([\d,]+) of ([\d,]+) parameters$", out, re.M)
    assert counts and int(counts[1].replace(",", "")) < int(counts[2].replace(",", ""))
    cfg, position = restore(tmp_path)
    assert (position.stage, position.step) == ("rl", 10)
    make = jax.jit(lambda: initial_params(cfg)) if devices > 1 else lambda: initial_params(cfg)
    before = dict(jax.tree_util.tree_leaves_with_path(make()))  # on a mesh they are made by jit
    for path, after in jax.tree_util.tree_leaves_with_path(position.state.policy):
        changed = not np.array_equal(before[path], after)
        assert changed == ("router" not in str(path)), path
    moments = jax.tree_util.tree_leaves_with_path(position.state.opt_state)
    assert moments and not any("router" in str(path) for path, _ in moments)
    # the same command resumes; another expression has other moments
    assert "resuming" in run(tmp_path, devices, changes | {"steps": 11})
    assert train.main(arguments(tmp_path, {"optim.trainable": ".*"})) == 2
    assert f"holds a run with optim.trainable={NO_ROUTER}" in capsys.readouterr().err


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("backbone", ["none", "own"])
def test_the_plan_counts_no_moments_and_no_copy_of_frozen_parameters(backbone, kl_coef):
    cfg = override(
        load_config("tiny.py"),
        f"optim.trainable={NO_ROUTER}",
        f"loss.kl_coef={kl_coef}",
        f"critic.backbone={backbone}",
        f"loss.advantages={'group_advantages' if backbone == 'none' else 'gae'}",
    )
    state, mem = stage_shapes(cfg, warmup_optimizer(cfg), rl_optimizer(cfg))["rl"], plan_memory(cfg)

    def nbytes(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    assert nbytes((state.params, state.frozen.policy)) == mem.weights
    assert nbytes(state.frozen.reference) == mem.reference
    assert 0 <= nbytes(state.opt_state) - mem.optimizer < 100  # counters
    assert nbytes(state.params) == mem.update == mem.gradients
    every = plan_memory(override(cfg, "optim.trainable=.*"))
    assert mem.weights == every.weights and mem.training < every.training


def test_it_is_refused_before_the_run_folder_exists_and_the_dry_run_counts(tmp_path, capsys):
    work = tmp_path / "run"
    for expression, part in (("router", "'.*router.*'"), ("(", "unterminated")):
        typed = ["--config", "tiny.py", "--workdir", str(work), "--set"]
        for more in ([], ["--dry-run"]):
            assert train.main([*typed, f"optim.trainable={expression}", *more]) == 2
            err = capsys.readouterr().err
            assert err.startswith("error: ") and err.count("\n") == 1 and part in err
    assert not work.exists()
    assert train.main([*typed, "optim.trainable=head", "--dry-run"]) == 0
    assert re.search(r"^trains       33,920 of 962,208$", capsys.readouterr().out, re.M)
