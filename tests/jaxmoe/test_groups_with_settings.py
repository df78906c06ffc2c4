# SPDX-License-Identifier: Apache-2.0
"""rollout.schedule=groups beside other settings: what was sampled is what is trained, by version.

The trainer's forward with the weights that sampled a token must have its log-prob and its experts,
to the bit where numerics are invariant.
"""

import itertools
import threading
import time

import numpy as np
import pytest

from jaxmoe.config import EngineError
from jaxmoe.rollout import native_flow
from tests.jaxmoe import tool_runs
from tests.jaxmoe.noted_groups import (
    PROMPTS,
    SAMPLES,
    check_groups,
    gaps_by_version,
    prompt_ids,
    run_noted,
)
from tests.jaxmoe.sandbox.kinds import first_kind

pytestmark = pytest.mark.slow  # runs, most of their time compiling

SOON = 600.0  # a step may be compiled meanwhile
STEPS = "steps=3", "eval.every_steps=3"
WARM = "warmup.steps=2", "warmup.sequences_per_step=8"
EXACT = (
    *STEPS,
    *("model.d_model=64", "model.d_expert=64", "model.numerics=invariant"),
    "optim.share_prompts=on",
)


def wait_until(holds):
    end = time.perf_counter() + SOON
    while not holds():
        assert time.perf_counter() < end
        time.sleep(0.001)


def change_in_flight(engine, cfg):
    """Have a group that is a step ahead wait in mid-answer for the weights of the step before.

    Otherwise a clock would decide which version samples a token.
    """
    flow, ids, started, n_loaded = engine.pin(), prompt_ids(cfg), set(), itertools.count()
    generate, load, read = flow.generate, engine.load, engine.read_loaded
    next_step: list = []

    def generate_and_note(prompts, *args, **named):
        started.add(prompts[0].id)
        return generate(prompts, *args, **named)

    def load_and_note(params, version):
        load(params, version)
        k = PROMPTS * next(n_loaded)
        next_step[:] = ids[k : k + PROMPTS]

    def may_go_on():
        with flow._changed:
            rows = [*flow._rows.values(), *flow._waiting]
        unfinished = {row.episode.prompt.id for row in rows} | (set(ids) - started)
        return unfinished & set(next_step) or not any(row.parts for row in rows)

    def read_in_turn():
        if threading.current_thread().name == "flow":
            wait_until(may_go_on)
        return read()

    flow.generate, engine.load, engine.read_loaded = generate_and_note, load_and_note, read_in_turn


@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    """A run whose answers have the weights of their admission, and replays their experts."""
    return run_noted(tmp_path_factory.mktemp("pinned"), *EXACT, "router.replay=R3")


ADAPTERS = ("lora.attention_rank=2", "lora.expert_rank=2", "lora.modules_to_save=router", *WARM)


def check_replay(run):
    check_groups(run)
    assert [row["staleness/max"] for row in run.rows] == [0, 1, 1]
    for row in run.rows:
        assert row["router/unknown_experts_frac"] == 0
    assert run.rows[0]["router/replay_agreement"] == 1
    assert run.rows[0]["train_rollout_logprob_abs_diff_max"] == 0


def test_replayed_experts_are_those_of_the_admission(pinned):
    check_replay(pinned)
    assert all(row["batch/computed_tokens_frac"] < 0.75 for row in pinned.rows)
    assert set(gaps_by_version(pinned, checks_experts=True)) == {(0, 1)}


@pytest.mark.parametrize(
    "config, sync, settings",
    [
        ("tiny.py", "keep", ()),
        ("tiny_lora.py", "recompute", ADAPTERS),
        ("tiny_mxfp4.py", "recompute", ()),
    ],
)
def test_replayed_experts_are_of_the_tokens_version(tmp_path, monkeypatch, config, sync, settings):
    """Of all weights, of adapters over a base in four bits, and of experts in four bits."""
    monkeypatch.setattr(native_flow, "CHUNK_TOKENS", 2)
    changes = (*EXACT, "router.replay=R3", f"rollout.native.on_weight_sync={sync}", *settings)
    run = run_noted(tmp_path, *changes, config=config, prepare=change_in_flight)
    check_replay(run)
    gaps = gaps_by_version(run, checks_experts=sync == "recompute")
    largest, n_versions = map(max, zip(*gaps, strict=True))
    assert n_versions == 2
    assert largest == 0 if sync == "recompute" else largest > 0
    assert not any(gap for gap, n in gaps if n == 1)


CRITIC = (
    *("loss.advantages=gae(trace=0.9)", "loss.old_logp=recomputed", "loss.minibatches=2"),
    *("critic.lr=1e-3", "optim.share_prompts=off"),  # minibatches divide the groups
)
PACKED = ("model.numerics=fast", "optim.tokens_per_microbatch=256")
TAUGHT = (
    *("distill.teacher=base", "distill.advantage_coef=0.5", "distill.reverse_kl_coef=0.3"),
    *("optim.lr=0.01", *WARM),
)


@pytest.mark.parametrize(
    "settings, name",
    [
        (("critic.backbone=own", *CRITIC), "critic/loss"),
        (("critic.backbone=shared", *CRITIC, *PACKED), "critic/loss"),
        (TAUGHT, "distill/reverse_kl"),
    ],
    ids=["own critic", "shared critic, packed", "teacher, warm start"],
)
def test_further_losses_train_on_each_group_once(tmp_path, settings, name):
    run = run_noted(tmp_path, *EXACT, *settings)
    check_groups(run)
    packed = run.cfg.optim.tokens_per_microbatch > 0
    for gap, n_versions in gaps_by_version(run):
        assert n_versions == 1 and gap <= (1e-5 if packed else 0)
    for row in run.rows:
        assert np.isfinite(row[name])
    assert run.rows[2][name] > 0


def test_a_stopped_run_replays_its_queue_bitwise(pinned, tmp_path):
    """Experts, log-probs and versions of answers that waited are those of the checkpoint."""
    settings = (*EXACT, "router.replay=R3")

    def breaks(step, engine):
        if step == 2:
            raise EngineError("the engine broke.")

    with pytest.raises(EngineError, match="the engine broke"):
        run_noted(tmp_path, *settings, before_step=breaks)
    resumed = run_noted(tmp_path, *settings)
    assert len(resumed.trained) == 2
    assert list(map(without_clock, resumed.rows)) == list(map(without_clock, pinned.rows))


def without_clock(row):
    clock = ("time/", "tokens_per_s", "rollout/overlap", "rollout/ready", "rollout/finished")
    return {k: v for k, v in row.items() if not (k.startswith(clock) or k.endswith("idle_frac"))}


def test_sandboxed_episodes_have_each_tokens_version(tmp_path):
    """A clock decides which weights sample a token, and which read a reply."""
    changes = {
        "data__tools": "python_sandbox",
        "sandbox__kind": first_kind(),
        "sandbox__warm": 1,
        "sandbox__call_s": 60,
        "warmup__demonstrations": "jaxmoe.configs.tiny_tool:demonstrate_calculator(share=1.0)",
        "rollout__sequences_per_step": PROMPTS * SAMPLES,
        "rollout__native__on_weight_sync": "recompute",
        "steps": 3,
    }
    run = run_noted(tmp_path, *tool_runs.settings(**changes), config="tiny_tool.py")
    check_groups(run)
    assert max(gap for gap, _ in gaps_by_version(run)) < 1e-5
    for row in run.rows:
        assert row["tool/calls"] > 0.5 and row["hack/forged_reply"] == 0
