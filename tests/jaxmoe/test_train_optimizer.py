# SPDX-License-Identifier: Apache-2.0
"""Runs without AdamW: trained, killed, resumed, exported, evaluated, compared."""

import sys
from dataclasses import replace

import optax
import pytest

from jaxmoe import doctor, export, train
from jaxmoe import eval as evaluate
from jaxmoe.config_file import load_config, override
from jaxmoe.run.parts import make_parts
from tests.jaxmoe.commands import command, finish, lines, start, wait_for

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZES = {"model__d_model": 64, "model__d_expert": 64, "steps": 4, "save__every_steps": 1}


def use_policy(args, out, capsys):
    """Export with a comparison, evaluate, and examine the newest checkpoint of a run."""
    assert export.main([*args, "--out", str(out), "--dtype", "mxfp4"]) == 0
    assert "nats" in capsys.readouterr().out and (out / "model.safetensors").is_file()
    assert evaluate.main(args) == 0
    assert "held-out rows (rl step" in capsys.readouterr().out
    assert doctor.main(args) == 0
    assert "AGREE" in capsys.readouterr().out


@pytest.mark.slow
def test_a_muon_run_makes_the_complete_trip(tmp_path, capsys):
    run = SIZES | {"optim__name": "muon"}
    code, _, err = finish(command(tmp_path / "steady", **run))
    assert code == 0, err
    process = start(command(tmp_path / "killed", **run))
    wait_for(process, tmp_path / "killed", "rl", 2)
    process.kill()
    process.communicate()
    assert len(lines(tmp_path / "killed")) < len(lines(tmp_path / "steady"))
    refused = command(tmp_path / "killed", **run | {"optim__name": "adamw"})
    code, _, err = finish(refused)
    assert code == 2 and err.count("\n") == 1
    assert "holds a run with optim.name=muon; it cannot continue with adamw" in err
    code, out, err = finish(command(tmp_path / "killed", **run))
    assert code == 0 and "resuming" in out and err == ""
    assert lines(tmp_path / "killed") == lines(tmp_path / "steady")
    use_policy(command(tmp_path / "killed", **run)[5:], tmp_path / "out", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False], ids=["config", "python"])
def test_an_optimizer_of_the_users_makes_the_same_trip(tmp_path, capsys, monkeypatch, named):
    """From Python, `tx=` takes the place of the config's optimizer."""
    (tmp_path / "own_optimizer.py").write_text(
        "import optax\n\n\ndef lion(learning_rate, *, beta=0.9):\n"
        "    return optax.lion(learning_rate, b1=beta)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = {"optim__name": "own_optimizer:lion(beta=0.8)"} if named else {}
    args = command(tmp_path / "run", **SIZES | name)[5:]

    def run(steps):
        if named:
            assert train.main([*args, "--set", f"steps={steps}"]) == 0
            return
        sets = [x for x in args if "=" in x]
        cfg = override(load_config("tiny.py"), *sets, f"steps={steps}", f"workdir={tmp_path}/run")
        train.train(cfg, replace(make_parts(cfg), tx=optax.lion(1e-3)))

    run(1)
    run(2)
    assert "after rl step 1" in capsys.readouterr().out
    use_policy(args, tmp_path / "out", capsys)
    assert train.main([*args, "--set", "optim.name=adamw"]) == 2
    err = capsys.readouterr().err
    assert "optim.name" in err and err.count("\n") == 1
    assert named or "must fit the run's optimizer: optimizer/state/" in err
    sys.modules.pop("own_optimizer", None)
