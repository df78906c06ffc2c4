# SPDX-License-Identifier: Apache-2.0
"""Runs with rollout.schedule=groups over servers: the loop, the engine and the wire are the real
ones; over stand-ins the update only changes the weights.
"""

import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from scripted import NUMBERS
from stand_in import StandIn
from vllm_cases import PYTHON

from jaxmoe.config import VllmConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.http_engine import server_pool
from jaxmoe.rl.update import TokenStats
from jaxmoe.run.programs import rl_program
from jaxmoe.vllm.engine.server import Server
from tests.jaxmoe.noted_groups import (
    PROMPTS,
    SMALL,
    check_groups,
    gaps_by_version,
    prompt_ids,
    run_noted,
)

MODEL = ("model.d_model=32", "model.d_expert=32", "model.n_experts=4")
SOON = 60.0


def wait_until(holds):
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def changing_step(state, batch, minibatches, base, **_):
    """Weights as different as random ones, without a gradient."""

    def change(w):
        return w + 0.1 * jnp.cos(jnp.arange(w.size, dtype=w.dtype)).reshape(w.shape)

    numbers = {name: jnp.zeros(()) for name in NUMBERS} | {"grad/norm": jnp.ones(())}
    stats = TokenStats(batch.rollout_logp_BT, batch.rollout_logp_BT)
    policy = jax.tree.map(change, state.policy)
    return replace(state, params=replace(state.params, policy=policy)), numbers, stats


def test_groups_outlive_a_server_that_comes_back(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server_pool, "MIN_RECONNECT_S", 0.05)
    cfg = override(load_config("tiny_vllm.py"), *MODEL, "rollout.max_new_tokens=12")
    servers = [StandIn(cfg.model, context=cfg.context + 1, delay=0.002) for _ in range(2)]
    n_answered: list[list[int]] = []  # by the servers before each step

    def before_step(step, engine):
        n_answered.append([len(server.requests) for server in servers])
        if step == 2:
            servers[1].crash()
        if step == 4:
            wait_until(lambda: any("is unavailable" in text for text in engine.incidents))
            servers[1].start()
            wait_until(lambda: any("is reconnected" in text for text in engine.incidents))

    try:
        run = run_noted(
            tmp_path / "run",
            *(*MODEL, "steps=6", "eval.every_steps=6", "rollout.max_staleness=2"),
            f"rollout.vllm.url={','.join(server.url for server in servers)}",
            *(f"rollout.vllm.weights_dir={tmp_path}/weights", "rollout.vllm.retries=2"),
            "rollout.vllm.on_weight_sync=abort",  # each answer is a request
            config="tiny_vllm.py",
            before_step=before_step,
            rl_program=partial(rl_program, step=changing_step),
            tx=optax.sgd(1.0),
        )
    finally:
        for server in servers:
            server.crash()
    check_groups(run)
    assert max(gap for gap, _ in gaps_by_version(run)) < 1e-4
    assert "Connection pool is full" not in caplog.text
    second = [answered[1] for answered in n_answered]
    assert 0 < second[1] <= second[2] == second[3] < second[-1]
    assert sum(row["rollout/incidents"] for row in run.rows) >= 2


LONG = (*MODEL, "rollout.max_new_tokens=120", "steps=4", "eval.every_steps=4", "router.replay=R3")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real vLLM, which takes a minute or more to start."""
    cfg = override(load_config("tiny_vllm.py"), *SMALL, *LONG)
    vllm = Server(
        VllmConfig(python=PYTHON),
        cfg.model,
        work=tmp_path_factory.mktemp("server"),
        number=0,
        context=cfg.context,
        rows=cfg.rollout.max_parallel_sequences,
    )
    vllm.start().close()
    yield vllm
    vllm.stop()


def sync_in_flight(engine, cfg):
    """Have the answers of the next step begin when the weights are about to change."""
    ids, entered = prompt_ids(cfg), []
    generate, load = engine.generate, engine.load

    def generate_late(prompts, *args, **named):
        if len(prompts) == 1:  # no evaluation
            number = ids.index(prompts[0].id)
            wait_until(lambda: len(entered) > number // PROMPTS)
        return generate(prompts, *args, **named)

    def load_in_flight(params, version):
        entered.append(version)
        if 0 < version < cfg.steps:
            wait_until(lambda: engine._pool.replicas[0].in_flight)
            time.sleep(0.05)  # into the answers
        load(params, version)

    engine.generate, engine.load = generate_late, load_in_flight


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_vllm_trains_each_group_once(server, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    run = run_noted(
        tmp_path / "run",
        *(*LONG, f"rollout.vllm.url={server.url}", f"rollout.vllm.on_weight_sync={mode}"),
        f"rollout.vllm.weights_dir={tmp_path}/weights",
        config="tiny_vllm.py",
        prepare=sync_in_flight,
    )
    check_groups(run)
    gaps, n_versions = zip(*gaps_by_version(run), strict=True)
    assert max(gaps) < 1e-4
    assert max(n_versions) == 1 if mode == "wait" else max(n_versions) > 1
    assert [row["staleness/max"] for row in run.rows] == [0, 1, 1, 1]
    assert run.rows[0]["train_rollout_logprob_abs_diff_max"] < 1e-4
    for row in run.rows:
        assert row["rollout/incidents"] == row["router/unknown_experts_frac"] == 0
