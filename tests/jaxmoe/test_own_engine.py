# SPDX-License-Identifier: Apache-2.0
"""An engine of the user's own, in one file that the config names: it trains, without a patch."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe import train
from jaxmoe.checkpoint.same_run import check_resume
from jaxmoe.collection.source_digests import source_digests
from jaxmoe.config import ConfigError, describe_engine, to_json
from jaxmoe.config.engine import may_change_at_resume
from jaxmoe.config_file import load_config, override
from jaxmoe.model import init_params, make_ops
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout.engine import open_engine
from tests.jaxmoe.commands import arguments, lines, train_here
from tests.jaxmoe.rollout.scripted_environment import ScriptedEnvironment

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
OWN = "rollout.engine=own_engine:describe_own(rows=8)"
SMALL = (
    "model.d_model=32 model.d_expert=24 model.n_experts=4 data.train_rows=64 data.held_out_rows=4 "
    "warmup.steps=0 rollout.sequences_per_step=8 rollout.samples_per_prompt=4 steps=2 "
    "rollout.max_gen_batches=1 eval.every_steps=2"
).split()
DESCRIPTION = """\
from jaxmoe.config import EngineDescription

def describe(cfg, **facts):
    return EngineDescription(open=print, summary="a peer's engine", **facts)

def describe_wrong(cfg):
    return "an engine"
"""


@pytest.fixture
def own_engine(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.slow
def test_the_docs_engine_trains_and_agrees_with_trainers(own_engine, tmp_path, capsys):
    words = arguments(tmp_path, *SMALL, OWN)
    assert train.main([*words, "--dry-run"]) == 0
    assert "rollouts     an engine without a cache, 8 rows at a time\n" in capsys.readouterr().out
    assert train_here(words) == 0
    steps = [row for row in lines(tmp_path) if row["stage"] == "rl" and row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0 < row["train_rollout_logprob_abs_diff"] < 1e-5 for row in steps)
    assert "eval/accuracy" in steps[-1]


@pytest.mark.slow
def test_the_docs_engine_has_the_native_episodes(own_engine):
    """Greedily, so that both choose the same tokens."""
    limits = (
        "rollout.max_new_tokens=12 rollout.max_turn_tokens=5 rollout.max_turns=4 "
        "rollout.max_context=96 data.max_prompt_tokens=40"
    ).split()
    cfg = override(load_config("tiny_tool.py"), OWN, *limits)
    ops, params = make_ops(cfg), init_params(jax.random.key(0), cfg.model)
    prompts = [Prompt(i, "", tuple(range(40 + i, 50 + 3 * i)), None) for i in range(7)]
    sampling = Sampling(
        max_new_tokens=12,
        stop_ids=tuple(range(40, 250, 2)),
        temperature=0.0,
        max_turns=4,
        max_turn_tokens=5,
        max_context=96,
    )
    pairs = []
    for engine_cfg in (cfg, override(cfg, "rollout.engine=native")):
        engine = open_engine(engine_cfg, ops, Path("unused"))
        engine.load(params, 1)
        world = ScriptedEnvironment(250, turns=4, longest=15)
        pairs.append(engine.generate(prompts, sampling, seed=0, samples=2, environment=world))
        engine.close()
    for custom, native in zip(*pairs, strict=True):
        assert custom.stop == native.stop and custom.turns == native.turns
        np.testing.assert_array_equal(custom.tokens, native.tokens)
        np.testing.assert_allclose(custom.rollout_logp, native.rollout_logp, atol=1e-5)
    assert max(len(rollout.turns) for rollout in pairs[0]) > 2
    assert len({rollout.stop for rollout in pairs[0]}) > 1


@pytest.fixture
def peer(tmp_path, monkeypatch):
    (tmp_path / "peer_engine.py").write_text(DESCRIPTION)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "fact, change, works",
    [
        ("reports_kept_mass", "rollout.top_k=5", "True"),
        ("reports_experts", "router.replay=R3", "True"),
        ("uses_trainer_forward", "model.numerics=invariant", "True, reports_experts=True"),
    ],
)
def test_settings_outside_the_description_are_refused(fact, change, works, peer):
    cfg = load_config("tiny.py")
    with pytest.raises(ConfigError, match=r"rollout.engine.*Try --set") as error:
        override(cfg, "rollout.engine=peer_engine:describe", change)
    override(cfg, f"rollout.engine=peer_engine:describe({fact}={works})", change)
    advice = str(error.value).partition("Try --set ")[2].partition(", or")[0].removesuffix(".")
    override(
        cfg,
        "rollout.engine=peer_engine:describe",
        change,
        *[word for word in shlex.split(advice) if word != "--set"],
    )


def test_log_probs_of_another_distribution_need_temperature_1(peer):
    raw = "rollout.engine=peer_engine:describe(reports_sampled_logp=False, reports_kept_mass=True)"
    cfg = override(load_config("tiny.py"), raw)
    for change in ("rollout.temperature=0.7", "rollout.top_p=0.9"):
        with pytest.raises(ConfigError, match="reports log-probs before they are applied"):
            override(cfg, change)


def test_a_resume_compares_an_engines_source(own_engine):
    assert "source of own_engine" in source_digests(override(load_config("tiny.py"), OWN))


def test_single_process_engines_are_refused_for_several_processes(peer, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    cfg = override(load_config("tiny.py"), "mesh.fsdp=2", "rollout.engine=peer_engine:describe")
    with pytest.raises(ConfigError, match="must run in one process"):
        check_mesh(cfg, 2)


@pytest.mark.parametrize(
    "name, answer",
    [
        ("sglang", "must be native, vllm or module:function, got 'sglang'. Try --set"),
        ("peer_engine:nothing", "must be a function that can be imported"),
        ("missing_engine:describe", "PYTHONPATH=FOLDER"),
        ("peer_engine:describe_wrong", "must return a jaxmoe.config.EngineDescription, got str"),
        ("peer_engine:describe_wrong(port=1)", "got an unexpected keyword argument 'port'"),
        ("peer_engine:describe(port=)", "must be a function with literal keyword arguments"),
    ],
)
def test_a_name_that_describes_no_engine_is_refused(name, answer, peer):
    with pytest.raises(ConfigError) as error:
        override(load_config("tiny.py"), f"rollout.engine={name}")
    assert answer in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_checking_a_config_imports_no_engine():
    """In a fresh interpreter, for each engine that ships."""
    code = (
        "import sys; from jaxmoe.config_file import load_config; load_config({!r});"
        "engines = {{'jaxmoe.rollout.native', 'jaxmoe.vllm.engine.vllm_engine', 'vllm'}};"
        "assert not engines & sys.modules.keys()"
    )
    for config in ("tiny.py", "tiny_vllm.py"):
        subprocess.run([sys.executable, "-c", code.format(config)], check=True)
    assert describe_engine(load_config("tiny_vllm.py")).summary.startswith("vLLM, 1 started")


def test_a_resume_may_change_what_the_engine_says(own_engine, peer, tmp_path):
    """`rows` of the example is such an option; another function, or other facts, are not."""
    saved = json.loads(to_json(override(load_config("tiny.py"), OWN)))

    def resume(engine):
        return check_resume(
            tmp_path, saved, override(load_config("tiny.py"), f"rollout.engine={engine}")
        )

    assert resume("own_engine:describe_own") and resume("own_engine:describe_own(rows=32)")
    with pytest.raises(ConfigError, match="cannot continue with native"):
        resume("native")
    # an option of the engine is no setting of the run, whatever its name
    assert not may_change_at_resume(override(load_config("tiny.py"), OWN), "rows", 7)
    saved["rollout"]["engine"] = "peer_engine:describe(runs_episodes=True)"
    with pytest.raises(ConfigError, match="cannot continue with peer_engine:describe"):
        resume("peer_engine:describe")
