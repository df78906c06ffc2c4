# SPDX-License-Identifier: Apache-2.0
"""The two `Ops` of docs/api/model.md, as they stand there, through whole steps: cut and packed."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG, MODEL, make_batch, routed_batch

from jaxmoe.model import plain_ops
from jaxmoe.model.moe.router import replay_routing, route_top_k, router_logits
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import jit_step
from pallas_kernels import sink_attention

PAGE = (Path(__file__).parents[3] / "docs" / "api" / "model.md").read_text()
GRPO = Algorithm()
SGD = optax.sgd(0.1)


def example(name, cut, experts=None):
    """Names that the page's code defines, on a batch in two microbatches or packed."""
    (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE, re.S)
    assert code.count("\n") <= 15
    batch = make_batch()
    if cut == "packed":
        length = 2 * batch.tokens_BT.shape[1]
        batch, _ = split_minibatches(batch, GRPO, seed=(0,), tokens_per_microbatch=length)
    names = dict(
        jax=jax,
        jnp=jnp,
        replace=replace,
        partial=partial,
        Scorer=Scorer,
        jit_step=jit_step,
        sink_attention=sink_attention,
        route_top_k=route_top_k,
        router_logits=router_logits,
        make_ops=lambda _cfg: plain_ops(),
        a=GRPO,
        experts=experts,
        tx=SGD,
        batch=batch,
        cfg=SimpleNamespace(
            model=CFG, optim=SimpleNamespace(microbatches=2 if cut == "cut" else 1)
        ),
        state=init_state(Trained(MODEL), SGD),
    )
    exec(compile(code, "docs/api/model.md", "exec"), names)
    return names


def test_a_counting_attention_runs_in_both_layers():
    namespace = example("ops attend", "cut")
    assert len(namespace["calls"]) >= 2  # four rows of a microbatch
    assert {shape[0] for shape in namespace["calls"]} == {4}
    assert np.isfinite(float(namespace["metrics"]["loss"]))


@pytest.fixture(scope="module")
def plain_step():
    """The step on the whole batch by the router that ships, and one with other experts."""
    step = jit_step(
        tx=SGD,
        algorithm=GRPO,
        scorer=Scorer(CFG, replace(plain_ops(), router=replay_routing), replay="R3"),
    )
    batch = routed_batch()
    other_experts = (batch.routed_experts_BTLA + 1) % CFG.n_experts
    batches = (batch, replace(batch, routed_experts_BTLA=other_experts))
    return [step(init_state(Trained(MODEL), SGD), b) for b in batches]


def test_a_custom_router_replays_like_ours(plain_step):
    namespace = example("ops router", "packed", routed_batch().routed_experts_BTLA)
    (state, metrics, _), (_, plain_metrics, _) = plain_step
    for x, y in zip(
        jax.tree.leaves(namespace["state"].params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    entropy = float(metrics["policy/entropy"])
    assert float(namespace["metrics"]["policy/entropy"]) == pytest.approx(entropy, rel=1e-4)
    assert float(plain_metrics["policy/entropy"]) != pytest.approx(entropy, rel=1e-3)
