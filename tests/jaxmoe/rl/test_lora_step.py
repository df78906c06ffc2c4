# SPDX-License-Identifier: Apache-2.0
"""Steps of RL on adapters: the base stays where and what it is, and engine and trainer share it."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import CFG, LORA, OPS, base_of, dense

from jaxmoe.config import OptimConfig
from jaxmoe.losses import kl_k3
from jaxmoe.model.lora import init_adapters, with_adapters
from jaxmoe.observe.profiling import compilations
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import rollout_batch
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, new_state
from jaxmoe.rl.update import rl_step
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
    made = NativeEngine(CFG, OPS, max_prompt_tokens=LONGEST, max_new_tokens=NEW, max_rows=16)
    made.keep(base())
    return made


def buffers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def fresh():
    adapters = jax.jit(lambda: init_adapters(jax.random.key(2), CFG, LORA))()
    return new_state(Trained(adapters), TX)


def policy(state):
    return with_adapters(base(), state.params.policy, LORA.scales)


def steps(count, **fields):
    """What is trained, sampled and scored so many times; and metrics of each step."""
    scorer = Scorer(CFG, OPS, scales=LORA.scales)
    step = jax.jit(
        partial(rl_step, tx=TX, algorithm=Algorithm(**fields), scorer=scorer), donate_argnums=0
    )
    state, native, told = fresh(), engine(), []
    for number in range(count):
        native.load(policy(state), number)
        sampling = Sampling(max_new_tokens=NEW, stop_ids=())
        rollouts = native.generate(PROMPTS, sampling, seed=number, samples=SAMPLES)
        rewards = np.array([np.mean(r.tokens % 2 == 0) for r in rollouts], np.float32)
        batch = rollout_batch(rollouts, rewards, samples=SAMPLES, length=LONGEST + NEW, pad_id=0)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            state, metrics, _ = step(state, batch, None, base())
        told.append({name: float(x) for name, x in metrics.items()} | {"reward": rewards.mean()})
    assert compilations(step) == 1
    return state, told


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_only_adapters_are_trained_and_the_base_stays_in_place_to_the_bit(count):
    held, where = jax.tree.map(np.array, base()), buffers(base())
    state, told = steps(count, kl=kl_k3, kl_coef=0.1)
    assert buffers(base()) == where
    jax.tree.map(np.testing.assert_array_equal, base(), held)
    assert state.frozen.base is None and state.frozen.reference is None
    wanted = [x.shape for x in jax.tree.leaves(fresh().params)]
    assert [x.shape for x in jax.tree.leaves(state.params)] == wanted
    assert sorted(x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim) == sorted(2 * wanted)
    moved = [float(jnp.abs(a - b).max()) for a, b in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(fresh().params), strict=True)]  # fmt: skip
    assert min(moved) > 0
    assert told[0]["policy/kl_ref"] < 1e-12  # the reference is the base: nothing has changed yet
    assert told[-1]["policy/kl_ref"] > 1e-6
    assert max(x["train_rollout_logprob_abs_diff"] for x in told) < 1e-5
    if count >= 100:
        assert np.mean([x["reward"] for x in told[-10:]]) > told[0]["reward"] + 0.1


def test_the_engine_reads_the_trainers_own_base_and_a_copy_of_the_adapters():
    native, state = engine(), fresh()
    native.load(policy(state), 0)
    loaded = native._loaded[0]
    where = set(buffers(base()))
    own = [x for x in buffers(loaded) if x not in where]
    assert where <= set(buffers(loaded))
    assert len(own) == len(jax.tree.leaves(state.params))
    assert not set(own) & set(buffers(state.params))


def test_before_training_greedy_tokens_are_those_of_the_decoded_base_to_the_bit():
    greedy = Sampling(max_new_tokens=NEW, stop_ids=(), temperature=0.0)
    found = []
    for number, params in enumerate([policy(fresh()), dense(base())]):
        engine().load(params, number)
        found.append(engine().generate(PROMPTS, greedy, seed=0))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)
