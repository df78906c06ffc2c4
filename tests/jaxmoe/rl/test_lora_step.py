# SPDX-License-Identifier: Apache-2.0
"""Steps of RL on adapters: the base stays where and what it is, and engine and trainer share it."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import CFG, LORA, OPS, base_of

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.config import OptimConfig
from jaxmoe.model.lora import init_adapters, with_adapters
from jaxmoe.observe.profiling import count_compilations
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.terms import kl_term
from jaxmoe.rl.update import jit_step
from jaxmoe.rollout.native import NativeEngine

SAMPLES, LONGEST, NEW = 4, 12, 16
PROMPTS = [Prompt(i, "", tuple(range(7 * i + 1, 7 * i + 9 + i)), None) for i in range(4)]
TX = make_optimizer(OptimConfig(lr=1e-2), steps=100)


@cache
def base():
    return base_of()


@cache
def engine():
    """One for all tests: each loads what it samples from, and programs are compiled once."""
    native = NativeEngine(CFG, OPS, max_prompt_tokens=LONGEST, max_new_tokens=NEW, max_rows=16)
    native.share_base(base())
    return native


def buffers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def fresh(lora=LORA):
    weights = base()  # before jit, which would trace what is made for the first time
    adapters = jax.jit(lambda: init_adapters(jax.random.key(2), CFG, lora, weights))()
    return init_state(Trained(adapters), TX)


def policy(state):
    return with_adapters(base(), state.params.policy, LORA.scales)


def steps(count, lora=LORA, **fields):
    """Train, sample and score `count` times; return the state and the metrics of each step."""
    scorer = Scorer(CFG, OPS, scales=LORA.scales)
    step = jit_step(tx=TX, algorithm=Algorithm(**fields), scorer=scorer, donate_argnums=0)
    state, native, results = fresh(lora), engine(), []
    for number in range(count):
        native.load(policy(state), number)
        sampling = Sampling(max_new_tokens=NEW, stop_ids=())
        rollouts = native.generate(PROMPTS, sampling, seed=number, samples=SAMPLES)
        rewards = np.array([np.mean(r.tokens % 2 == 0) for r in rollouts], np.float32)
        batch = rollout_batch(rollouts, rewards, samples=SAMPLES, length=LONGEST + NEW, pad_id=0)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            state, metrics, _ = step(state, batch, None, base())
        results.append({name: float(x) for name, x in metrics.items()})
    assert count_compilations(step) == 1
    return state, results


@pytest.mark.slow
def test_only_adapters_train_and_the_base_is_unchanged():
    copy, base_buffers = jax.tree.map(np.array, base()), buffers(base())
    state, results = steps(3, terms=(kl_term(0.1),))
    assert buffers(base()) == base_buffers
    jax.tree.map(np.testing.assert_array_equal, base(), copy)
    assert state.frozen.base is None and state.frozen.reference is None
    shapes = [x.shape for x in jax.tree.leaves(fresh().params)]
    assert [x.shape for x in jax.tree.leaves(state.params)] == shapes
    assert sorted(x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim) == sorted(2 * shapes)
    moved = [
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(fresh().params), strict=True)
    ]
    assert min(moved) > 0
    assert results[0]["policy/kl_ref"] < 1e-12  # the reference is the base: nothing has changed yet
    assert results[-1]["policy/kl_ref"] > 1e-6
    assert max(x["train_rollout_logprob_abs_diff"] for x in results) < 1e-5


@pytest.mark.slow
def test_completely_trained_modules_move_and_are_sampled_from():
    lora = replace(LORA, modules_to_save="router,sinks,norms,head")
    copy = jax.tree.map(np.array, base())
    state, results = steps(3, lora, terms=(kl_term(0.1),))
    jax.tree.map(np.testing.assert_array_equal, base(), copy)
    assert results[0]["policy/kl_ref"] < 1e-12 < results[-1]["policy/kl_ref"]
    assert max(x["train_rollout_logprob_abs_diff"] for x in results) < 1e-5
    trained, layer = state.params.policy, base()["layers"]["full"]
    for name in ("w_router", "sinks", "attn_norm"):
        assert float(jnp.abs(trained["layers"]["full"][name] - layer[name]).max()) > 1e-3
    assert float(jnp.abs(trained["head"] - base()["head"]).max()) > 1e-3
    engine().load(policy(state), 4)
    copied = set(buffers(base())) - set(buffers(engine()._loaded[0]))
    assert len(copied) == 2 * 5 + 2  # router's two, sinks, two norms of each kind; final norm, head


def test_the_engine_takes_an_embedding_on_the_host():
    state, native = fresh(), engine()
    table = base() | {"embed": np.array(base()["embed"])}
    waits = with_adapters(table, state.params.policy, LORA.scales)
    sampling, gaps = Sampling(max_new_tokens=NEW, stop_ids=()), []
    try:
        native.share_base(table)
        native.load(waits, 0)
        assert native._loaded[0]["embed"] is table["embed"]  # no copy of it on the device
        gaps.append(native.generate(PROMPTS, sampling, seed=5))
    finally:
        native.share_base(base())
    native.load(policy(state), 0)
    gaps.append(native.generate(PROMPTS, sampling, seed=5))
    for a, b in zip(*gaps, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)


def test_the_engine_shares_the_base_and_copies_adapters():
    native, state = engine(), fresh()
    native.load(policy(state), 0)
    loaded = native._loaded[0]
    base_buffers = set(buffers(base()))
    copied = [x for x in buffers(loaded) if x not in base_buffers]
    assert base_buffers <= set(buffers(loaded))
    assert len(copied) == len(jax.tree.leaves(state.params))
    assert not set(copied) & set(buffers(state.params))
