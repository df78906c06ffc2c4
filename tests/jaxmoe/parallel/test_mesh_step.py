# SPDX-License-Identifier: Apache-2.0
"""Whole steps on eight devices are those on one, whatever the mesh cuts."""

from dataclasses import replace
from functools import cache, partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.batches.batch import Batch
from jaxmoe.config import MeshConfig, OptimConfig
from jaxmoe.losses import gae
from jaxmoe.model import init_critic, init_params, plain_ops
from jaxmoe.model.moe.router import replay_routing, route_top_k
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import AXES, make_mesh, shard_batch, state_shardings
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, init_state
from jaxmoe.rl.terms import kl_term, value_term
from jaxmoe.rl.update import jit_step
from tests.jaxmoe.parallel.collectives import beside_loops
from tests.jaxmoe.small_models import SEVEN_EXPERTS

pytestmark = pytest.mark.usefixtures("standard_promotion")

CFG = replace(
    SEVEN_EXPERTS,
    vocab_size=250,
    vocab_multiple=16,
    n_q_heads=16,
    n_kv_heads=8,
    n_experts=8,
    experts_per_token=2,
)
B, T = 16, 40
# by a smaller eps Adam makes whole steps of gradients that are rounding alone, and experts switch
TX = make_optimizer(OptimConfig(lr=1e-3, eps=1e-5), steps=100)
GRPO = Algorithm(old_logp="recomputed", terms=(kl_term(0.1),))
PPO = Algorithm(advantages=partial(gae, trace=0.9), critic="own", terms=(value_term(),))
TWOS = [dict.fromkeys(three, 2) for three in combinations(AXES, 3)]
EIGHTS = [{axis: 8} for axis in AXES]


def put_state(state, mesh):
    return state if mesh is None else jax.device_put(state, state_shardings(state, CFG, mesh))


def make_batch(seed):
    dice = np.random.default_rng(seed)
    ends, time = dice.integers(20, T + 1, (B, 1)), np.arange(T)[None]
    mask = (time >= 8) & (time < ends)
    return Batch(
        tokens_BT=np.where(time < ends, dice.integers(0, 250, (B, T)), 0).astype(np.int32),
        positions_BT=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        segment_ids_BT=(time < ends).astype(np.int32),
        loss_mask_BT=mask,
        rollout_logp_BT=np.where(mask, -5.5, 0.0).astype(np.float32),
        rewards_B=dice.normal(size=B).astype(np.float32),
        samples_per_prompt=4,
    )


def routed_batch(seed):
    """Return a batch with experts that no router would choose."""
    batch = make_batch(seed)
    ranks = np.random.default_rng(seed).random((B, T, CFG.n_layers, CFG.n_experts)).argsort(-1)
    chosen = ranks[..., : CFG.experts_per_token].astype(np.uint8)
    return replace(batch, routed_experts_BTLA=chosen)


def with_hot_biases(params):
    """A bias of zeros shows nothing of how often it is added."""

    def make_large(path, x):
        return 0.3 * jnp.cos(jnp.arange(x.size)).reshape(x.shape) if "b_" in str(path[-1]) else x

    return jax.tree_util.tree_map_with_path(make_large, params)


@partial(jax.jit, static_argnums=0)
def make_state(a):
    params = with_hot_biases(init_params(jax.random.key(0), CFG))
    critic = None
    if a.critic != "none":
        critic = init_critic(params, CFG, "float32", own_backbone=True)
        critic["value_head"]["w_value"] = jnp.sin(jnp.arange(CFG.d_model, dtype=jnp.float32))
    reference = jax.tree.map(lambda x: 1.1 * x, params) if a.needs_reference else None
    return init_state(Trained(params, critic), TX, Frozen(reference))


def run_losses(a, sizes, steps, remat=lambda pair: pair, batch=make_batch, router=route_top_k):
    """Loss, entropy and gradient norm of so many steps on a mesh, all by one program.

    Of the loss alone little would be seen: where the ratio is 1 it is that of any model.
    """
    mesh = make_mesh(MeshConfig(**sizes))
    ops = sharded_ops(replace(plain_ops(), remat=remat, router=router), mesh, CFG)
    state = put_state(make_state(a), mesh)
    pins = (
        {} if mesh is None else {"out_shardings": (state_shardings(state, CFG, mesh), None, None)}
    )
    replay = "R3" if router is replay_routing else ""
    scorer = Scorer(CFG, ops, critic=a.critic, replay=replay)
    step = jit_step(tx=TX, algorithm=a, scorer=scorer, donate_argnums=0, **pins)
    # a program made ahead refuses what another step would need: other shapes, other places
    step = step.lower(state, shard_batch(batch(0), mesh)).compile()
    if mesh is not None:  # or devices of a CPU may wait for each other: jaxmoe/distributed/host.py
        assert not beside_loops(step.as_text())
    actual = []
    for seed in range(steps):
        state, metrics, _ = step(state, shard_batch(batch(seed), mesh))
        actual.append([float(metrics[name]) for name in ("loss", "policy/entropy", "grad/norm")])
    return np.array(actual)


@cache
def on_one(a, steps):
    return run_losses(a, {}, steps)


def test_a_mesh_step_equals_a_single_device_step():
    """Biases are not 0, and the experts are the engine's, not the router's own."""
    plain = Algorithm()  # one forward: the slow ones have a reference, old log-probs, a critic
    options = {"batch": routed_batch, "router": replay_routing}
    actual = run_losses(plain, {"fsdp": 2, "expert": 2, "tensor": 2}, 2, **options)
    assert np.abs(actual - run_losses(plain, {}, 2, **options)).max() < 2e-5


@pytest.mark.slow  # fifteen meshes, a quarter of a minute each
@pytest.mark.extended  # a step of one is in the default suite
@pytest.mark.parametrize("a", [GRPO, PPO], ids=["grpo", "ppo"])
@pytest.mark.parametrize("sizes", TWOS + EIGHTS, ids=str)
def test_twenty_steps_on_eight_devices_match_one(a, sizes):
    actual = run_losses(a, sizes, 20)
    assert np.abs(actual - on_one(a, 20)).max() < 2e-5
