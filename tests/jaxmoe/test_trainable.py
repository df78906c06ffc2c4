# SPDX-License-Identifier: Apache-2.0
"""`--set optim.trainable=…`: the command, its memory, its checkpoints and its resume."""

import re

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
from tests.jaxmoe.commands import SMALL, command, finish

NO_ROUTER = "(?!.*router).*"
RUN = SMALL | {
    "warmup.steps": 10,
    "steps": 10,
    "eval.every_steps": 10,
    "save.every_steps": 10,
    "loss.kl_coef": 0.1,
    "optim.trainable": NO_ROUTER,
}


def run(work, devices, changes):
    typed = command(work, sizes=RUN | changes)
    code, out, err = finish(typed, JAX_NUM_CPU_DEVICES=str(devices))
    assert code == 0, err
    return out


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
def test_a_frozen_router_is_unchanged_after_20_steps(tmp_path, capsys, changes, devices):
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
    assert train.main(command(tmp_path, sizes=RUN | {"optim.trainable": ".*"})[5:]) == 2
    assert f"holds a run with optim.trainable={NO_ROUTER}" in capsys.readouterr().err


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("backbone", ["none", "own"])
def test_the_plan_counts_frozen_parameters_once(backbone, kl_coef):
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
    all_plan = plan_memory(override(cfg, "optim.trainable=.*"))
    assert mem.weights == all_plan.weights and mem.training < all_plan.training


def test_a_bad_expression_is_refused_before_any_folder(tmp_path, capsys):
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
