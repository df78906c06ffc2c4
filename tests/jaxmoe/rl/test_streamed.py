# SPDX-License-Identifier: Apache-2.0
"""Moments in the host's memory: the same updates, bit for bit, and they go back there."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.config import ModelConfig, OptimConfig
from jaxmoe.model import init_params
from jaxmoe.parallel.sharding import make_one_device_mesh, move_to_host_memory, state_shardings
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.streamed import stream_state
from pallas_kernels.ahead_of_time import chip_mesh, compile_on, compiler_unavailable

pytestmark = pytest.mark.usefixtures("standard_promotion")

# stacks of three layers; a critic without any, of which one parameter is a scalar, as a count is
SHAPES = Trained(
    {"embed": (5, 7), "layers": {"full": {"w": (3, 4, 2), "b": (3, 6)}, "sliding": {"s": (3, 1)}}},
    {"value_head": {"w": (7,), "b": ()}},
)
CFG = ModelConfig(
    vocab_size=11,
    d_model=8,
    n_layers=2,
    n_q_heads=2,
    n_kv_heads=1,
    head_dim=4,
    n_experts=2,
    experts_per_token=1,
    d_expert=3,
    sliding_window=2,
)
# as the run's is, with a count in two of its states and weights that decay; of small integers its
# products are exact, so that it is no matter which of them a loop adds without rounding
ADAMW = optax.adamw(lambda count: jnp.exp2(-count), b1=0.5, b2=0.5, eps=1.0, weight_decay=0.5)


def drawn(seed):
    dice = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(dice.integers(-4, 5, shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def test_updates_and_moments_are_those_of_the_same_optimizer_on_a_device():
    def two(tx, state):
        sums = [drawn(0)]
        for seed in (1, 2):
            update, state = jax.jit(tx.update)(drawn(seed), state, sums[0])
            sums.append(update)
        return sums, state

    state = ADAMW.init(drawn(0))
    host = NamedSharding(make_one_device_mesh(), PartitionSpec(), memory_kind="pinned_host")
    host_state = jax.tree.map(lambda x: jax.device_put(x, host) if x.ndim else x, state)
    (plain, after), (streamed, streamed_state) = (
        two(ADAMW, state),
        two(stream_state(ADAMW), host_state),
    )
    for a, b in zip(
        jax.tree.leaves((plain, after)), jax.tree.leaves((streamed, streamed_state)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, (streamed, streamed_state))
    assert set(jax.tree.leaves(kinds[0])) == {"device"}
    assert kinds[1] == jax.tree.map(lambda x: x.sharding.memory_kind, host_state)


def test_where_all_is_on_the_device_the_program_is_that_of_the_optimizer_alone():
    arguments = drawn(1), ADAMW.init(drawn(0)), drawn(0)
    plain, streamed_text = (
        str(jax.make_jaxpr(tx.update)(*arguments)) for tx in (ADAMW, stream_state(ADAMW))
    )
    assert plain == streamed_text and "Host" not in streamed_text


def test_of_a_state_on_the_host_the_arrays_of_moments_are_there_and_nothing_else():
    tx = make_optimizer(OptimConfig(lr=0.1), steps=3)
    state = jax.eval_shape(lambda: init_state(Trained(init_params(jax.random.key(0), CFG)), tx))
    for space, kind in (("device", "device"), ("host", "pinned_host")):
        lie = state_shardings(state, CFG, make_one_device_mesh(), space)
        for x, sharding in zip(
            jax.tree.leaves(state.opt_state), jax.tree.leaves(lie.opt_state), strict=True
        ):
            assert sharding.memory_kind == (kind if x.ndim else "device")
        other_shardings = replace(lie, opt_state=None)
        assert {sharding.memory_kind for sharding in jax.tree.leaves(other_shardings)} == {"device"}


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["h200", "v5e"])
def test_a_chip_has_the_moments_of_a_few_pairs_at_a_time(chip):
    """The state's arrays stay the host's own, in place; without streaming all come at once."""
    if reason := compiler_unavailable(chip):
        pytest.skip(reason)
    mesh = make_one_device_mesh(chip_mesh(chip).devices.flat[0])
    replicated = NamedSharding(mesh, PartitionSpec())
    params = {"layers": jax.ShapeDtypeStruct((24, 512, 512), jnp.float32, sharding=replicated)}
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=move_to_host_memory(replicated) if x.ndim else replicated
        ),
        jax.eval_shape(ADAMW.init, params),
    )
    lie = jax.tree.map(lambda x: x.sharding, (params, state))
    memory: Any = compile_on(
        mesh,
        stream_state(ADAMW).update,
        params,
        state,
        params,
        donate_argnums=(0, 1),
        out_shardings=lie,
    ).memory_analysis()
    pair, moments = 4 * 512 * 512, 2 * 4 * 24 * 512 * 512
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == moments
    assert memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < 8 * pair < moments / 4
