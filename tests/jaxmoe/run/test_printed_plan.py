# SPDX-License-Identifier: Apache-2.0
"""The plan that the dry run prints: what would run, by the names of the config."""

import pytest
from printed_plan import what_runs

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.model.params import count_params
from jaxmoe.run.dry_run import format_plan
from jaxmoe.run.memory import format_bytes
from jaxmoe.weight_sync.update import count_sent_bytes

GAE = "loss.advantages=gae"


def test_tiny_says_its_parameters_and_its_warm_start():
    cfg = load_config("tiny.py")
    text = format_plan(cfg)
    assert f"parameters   {count_params(cfg.model)[0]:,} (" in text
    warm, r = cfg.warmup, cfg.rollout
    assert f"{warm.steps} supervised steps of {warm.sequences_per_step} answers" in text
    assert f"({r.prompts_per_step} prompts x {r.samples_per_prompt})" in text


def test_a_plan_names_the_mesh():
    cfg = load_config("tiny.py")
    assert "devices      1 (no mesh)" in format_plan(cfg)
    four = format_plan(override(cfg, "mesh.fsdp=2", "mesh.expert=2"))
    assert "devices      4 (fsdp 2 x expert 2)" in four


def test_the_algorithm_is_named_as_in_the_config():
    lines = what_runs(load_config("tiny.py"))
    assert lines["objective"] == "ppo_clip, group_advantages, old_logp detached"
    assert not {"critic", "correction", "updates", "GRPO"} & lines.keys()
    lines = what_runs(
        load_config("tiny.py"),
        "loss.objective=gspo(clip_high=4e-4)",
        "loss.old_logp=recomputed",
        "loss.rollout_correction=token_is(high=2.0) + veto",
        "loss.epochs=2",
        "loss.minibatches=4",
    )
    assert lines["objective"] == ("gspo(clip_high=4e-4), group_advantages, old_logp recomputed")
    assert lines["correction"] == "token_is(high=2.0) + veto"
    assert lines["updates"] == "2 x 4 per step (epochs x minibatches)"


def test_a_preset_is_named_with_what_it_sets():
    lines = what_runs(load_config("tiny.py"), "loss.preset=bypass_pg_is")
    assert lines["objective"] == "reinforce, group_advantages, old_logp detached"
    assert lines["correction"] == "sequence_is(high=2.0) (preset bypass_pg_is)"
    assert what_runs(load_config("tiny.py"), "loss.preset=disabled")["correction"] == (
        "none (preset disabled)"
    )


def test_the_critic_is_named():
    assert what_runs(load_config("gptoss20b_ppo.py"))["critic"] == (
        "own backbone, lr 2e-06, pretrained for 20 steps"
    )
    lines = what_runs(load_config("tiny.py"), GAE, "critic.backbone=shared", "critic.lr=1e-4")
    assert lines["critic"] == "shared backbone, lr 0.0001"


def test_the_engine_is_named_and_where_it_runs():
    assert what_runs(load_config("tiny.py"))["rollouts"] == "native engine"
    cfg = load_config("tiny_vllm.py")
    aside = " (its memory is not in this table)"
    assert what_runs(cfg)["rollouts"] == "vLLM, 1 started by the run" + aside
    assert what_runs(cfg, "rollout.vllm.launch=0")["rollouts"] == "vLLM, in this process" + aside
    ahead = (
        "rollout.max_staleness=2",
        "rollout.vllm.url=http://a:1",
        "loss.preset=decoupled_token_is",
    )
    assert what_runs(cfg, *ahead)["rollouts"] == (
        f"vLLM at http://a:1{aside}, up to 2 steps ahead of the weights"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_copies_of_sent_weights_are_listed(dtype):
    cfg = override(load_config("tiny_vllm.py"), f"rollout.vllm.dtype={dtype}")
    assert "sent weights" not in format_plan(cfg)
    cfg = override(cfg, "rollout.vllm.complete_sync_every=16")
    size = format_bytes(count_sent_bytes(cfg.model, dtype, "dense"))
    text = format_plan(cfg)
    assert f"sent weights {size}   (in this host's memory" in text
    assert f"  a worker   {size}   (in the memory of each worker's host)" in text
    assert "sent weights" in format_plan(cfg, "evaluating")
    assert "sent weights" not in format_plan(cfg, "exporting")


def test_custom_terms_and_routers_are_named_or_refused(tmp_path, monkeypatch):
    (tmp_path / "my_plan.py").write_text(
        "def mean(logp_BT):\n    return logp_BT\n"
        "def top(h_BTD, layer, *, active):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert not {"terms", "router"} & what_runs(load_config("tiny.py")).keys()
    lines = what_runs(
        load_config("tiny.py"),
        "loss.terms=my_plan:mean(weight=0.1)",
        "router.route=my_plan:top",
        "router.record=record_router_logits",
    )
    assert lines["terms"] == "my_plan:mean(weight=0.1)"
    assert lines["router"] == "my_plan:top, recording record_router_logits"
    with pytest.raises(ConfigError, match="there is no function 'topk'"):
        format_plan(override(load_config("tiny.py"), "router.route=topk"))
