# SPDX-License-Identifier: Apache-2.0
"""`lora.init_from=DIR`: training and evaluation begin with a PEFT adapter."""

import dataclasses
import json
import shutil
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from jaxmoe import eval as evaluation
from jaxmoe import train
from jaxmoe.checkpoint.base import load_base
from jaxmoe.checkpoint.hf import save_params
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.peft.init_from import load_initial_adapters
from jaxmoe.checkpoint.peft.write import CONFIG, save_adapter
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.model import plain_ops
from jaxmoe.observe.metrics import read_metrics, read_samples
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import init_rl_state, init_run_adapters, stage_shapes
from jaxmoe.run.memory import plan_memory
from jaxmoe.run.programs import warmup_optimizer
from tests.jaxmoe.checkpoint.random_adapters import is_same_tree, random_adapters
from tests.jaxmoe.commands import arguments, train_here
from tests.jaxmoe.random_weights import random_weights

SMALL = (
    "model.d_model=64 model.d_expert=128 model.n_experts=3 data.train_rows=64 "
    "data.held_out_rows=4 warmup.steps=0 eval.samples_per_prompt=1 rollout.sequences_per_step=4 "
    "rollout.samples_per_prompt=2 steps=0"
).split()
LORA = ["lora.attention_rank=3", "lora.expert_rank=2", "lora.expert_alpha=6.0"]
CFG = override(load_config("tiny.py"), *SMALL, *LORA)
ADAPTERS = random_adapters(CFG.model, CFG.lora.ranks, size=0.3)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    """A base, and an adapter that was trained on it."""
    folder = tmp_path_factory.mktemp("adapter")
    packed, _ = pack_experts(random_weights(CFG.model, 3), CFG.model)
    save_params(packed, CFG.model, folder / "words", dtype="mxfp4")
    save_adapter(ADAPTERS, CFG.model, CFG.lora, folder / "peft", base="someone/words")
    return override(
        CFG,
        f"init.checkpoint={folder}/words",
        f"lora.init_from={folder}/peft",
        f"workdir={folder}/run",
    )


def test_a_run_starts_from_adapter_as_reference(cfg):
    cfg = override(cfg, "loss.kl_coef=0.1")
    base, tx = load_base(cfg), rl_optimizer(cfg)
    adapters = init_run_adapters(cfg, base)
    assert is_same_tree(adapters, ADAPTERS)
    state = init_rl_state(adapters, cfg, tx)
    scorer = Scorer(cfg.model, plain_ops(), scales=cfg.lora.scales)
    frozen = dataclasses.replace(state.frozen, base=base)
    reference = scorer.full_reference(frozen)
    policy = scorer.full_params(state.params, frozen).policy
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), reference, policy))
    shapes = stage_shapes(cfg, warmup_optimizer(cfg), tx)["rl"]
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.frozen.reference))
    assert plan_memory(cfg).reference == nbytes > 0
    assert jax.tree.structure(shapes) == jax.tree.structure(state)


def words_of(cfg, *more):
    init = f"init.checkpoint={cfg.init.checkpoint}", f"lora.init_from={cfg.lora.init_from}"
    return arguments(cfg.workdir, *SMALL, *LORA, *init, *more)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (["lora.attention_rank=4"], "--set lora.attention_rank=3 "),
        (["lora.expert_alpha=5.0"], "--set lora.expert_alpha=6."),
        (["lora.targets=w_q,w_down"], "--set lora.targets=w_q,w_k,w_v,w_o,w_gate_up,w_down "),
        (["lora.rank_stabilized=True"], "--set lora.rank_stabilized=False "),
    ],
)
def test_another_rank_alpha_or_target_is_refused(cfg, capsys, change, advice):
    for command in (train, evaluation):
        assert command.main(words_of(cfg, *change, "workdir=" + cfg.workdir + "-refused")) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and advice in err, err
    assert load_initial_adapters(override(cfg, *change, *typed(err)))


def typed(message):
    """The settings that a message tells the user to type."""
    words = message.partition("Try ")[2].strip().removesuffix(".").split()
    return [word for word in words if "=" in word]


def test_another_base_is_refused(cfg, tmp_path):
    peft = shutil.copytree(cfg.lora.init_from, tmp_path / "peft")
    config = json.loads((peft / CONFIG).read_text())
    (peft / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "openai/other"}))
    with pytest.raises(ConfigError, match="which is openai/other; got .*words.") as error:
        load_initial_adapters(override(cfg, f"lora.init_from={peft}"))
    assert "\n" not in str(error.value) and "--set init.checkpoint=" in str(error.value)


@pytest.mark.parametrize(
    ("name", "fits"), [("runs/a/base", False), ("runs/b/base", True), ("base", True)]
)
def test_a_runs_base_is_known_by_its_run(cfg, tmp_path, name, fits):
    peft = shutil.copytree(cfg.lora.init_from, tmp_path / "peft")
    config = json.loads((peft / CONFIG).read_text()) | {"base_model_name_or_path": name}
    (peft / CONFIG).write_text(json.dumps(config))
    (tmp_path / "b").mkdir()
    shutil.copytree(cfg.init.checkpoint, tmp_path / "b" / "base")
    changes = f"lora.init_from={peft}", f"init.checkpoint={tmp_path / 'b' / 'base'}"
    with nullcontext() if fits else pytest.raises(ConfigError, match=f"which is {name}; got"):
        load_initial_adapters(override(cfg, *changes))


@pytest.mark.parametrize("change", ["warmup.steps=1", "init.checkpoint="])
def test_it_needs_a_given_base(cfg, change):
    with pytest.raises(ConfigError, match="needs its base"):
        override(cfg, change)


def test_it_needs_a_rank(cfg):
    with pytest.raises(ConfigError, match="needs a rank"):
        override(cfg, "lora.attention_rank=0", "lora.expert_rank=0")


@pytest.mark.slow  # compiles
def test_an_adapter_is_scored_trained_and_read_once(cfg, tmp_path, capsys):
    cfg = override(cfg, f"workdir={tmp_path}/run")
    assert evaluation.main(words_of(cfg)) == 0
    out = capsys.readouterr().out
    assert "(the adapter " in out
    peft = shutil.copytree(cfg.lora.init_from, tmp_path / "moved")
    cfg = override(cfg, f"lora.init_from={peft}")
    assert train_here(words_of(cfg, "steps=1", "save.every_steps=1")) == 0
    shutil.rmtree(peft)
    assert train_here(words_of(cfg, "steps=2", "save.every_steps=1")) == 0
    assert "resuming" in capsys.readouterr().out


@pytest.mark.slow  # compiles
def test_a_start_before_any_checkpoint_is_fresh(cfg, tmp_path, capsys):
    """The second start, with other adapters, evaluates them and does not keep the first's score."""
    cfg, answers = override(cfg, f"workdir={tmp_path}/run"), []
    for changes in ([], ["lora.init_from="]):
        assert train_here(words_of(cfg, *changes)) == 0
        (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert row["step"] == 0 and "eval/accuracy" in row
        answers.append([r["response"] for r in read_samples(tmp_path / "run" / "samples.jsonl")])
    assert "resuming" not in capsys.readouterr().out
    assert answers[0] != answers[1] and len(answers[0]) == len(answers[1])
