# SPDX-License-Identifier: Apache-2.0
"""The two `Ops` of docs/extending.md, as they stand there, through whole steps: cut and packed."""

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
from jaxmoe.model.router import replay, route, router_logits
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import divide
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, new_state
from jaxmoe.rl.update import rl_step
from pallas_kernels import sink_attention

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
GRPO = Algorithm(samples_per_prompt=4, old_logp="recomputed", minibatches=2)
SGD = optax.sgd(0.1)
CUTS = {"whole": 0, "packed": 2 * make_batch().tokens_BT.shape[1]}


def example(name, batch, tokens_per_microbatch, experts=None):
    """What the page's code leaves behind, on a batch of two minibatches."""
    (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE, re.S)
    batch, minibatches = divide(batch, GRPO, seed=(0,), tokens_per_microbatch=tokens_per_microbatch)
    names = dict(
        jax=jax, jnp=jnp, np=np, replace=replace, partial=partial, Scorer=Scorer, rl_step=rl_step,
        sink_attention=sink_attention, route=route, router_logits=router_logits,
        make_ops=lambda _cfg: plain_ops(), algorithm=lambda _cfg: GRPO, experts=experts,
        cfg=SimpleNamespace(model=CFG), tx=SGD, batch=batch, minibatches=minibatches,
        state=new_state(Trained(MODEL), SGD),
    )  # fmt: skip
    assert code.count("\n") <= 14
    exec(compile(code, "docs/extending.md", "exec"), names)
    return names


@pytest.mark.parametrize("cut", CUTS)
def test_an_attention_that_counts_sees_every_layer_of_every_forward(cut):
    found = example("ops attend", make_batch(), CUTS[cut])
    # two layers in the pair; scored once, and once under the gradient
    assert len(found["calls"]) >= 4 and np.isfinite(float(found["metrics"]["loss"]))
    rows = 2 if cut == "packed" else 4  # of a microbatch, of a minibatch
    assert any(shape[0] == rows for shape in found["calls"])


@pytest.mark.parametrize("cut", CUTS)
def test_a_router_of_ones_own_replays_as_ours_does(cut):
    experts = routed_batch().routed_experts_BTLA
    found = example("ops router", make_batch(), CUTS[cut], experts)
    ours = Scorer(CFG, replace(plain_ops(), router=replay))
    batch = replace(found["batch"], routed_experts_BTLA=experts)
    step = jax.jit(partial(rl_step, tx=SGD, algorithm=GRPO, scorer=ours))
    state, metrics = step(new_state(Trained(MODEL), SGD), batch, found["minibatches"])
    for x, y in zip(
        jax.tree.leaves(found["state"].params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    _, own = step(new_state(Trained(MODEL), SGD), found["batch"], found["minibatches"])
    assert float(metrics["loss"]) != float(own["loss"])
