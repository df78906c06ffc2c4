# SPDX-License-Identifier: Apache-2.0
"""Experts cut over eight devices against all of them on one, and both against float64."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MeshConfig, ModelConfig
from jaxmoe.model import plain_ops
from jaxmoe.model.moe.experts import apply_experts
from jaxmoe.parallel import exchange, expert, pairs
from jaxmoe.parallel.expert import choose_dispatch, experts_all_gather, experts_all_to_all
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import SAMPLING, make_mesh
from pallas_kernels.dispatch import Target
from tests.jaxmoe.parallel.ragged import emulate_ragged
from tests.pallas_kernels.three_way import three_way

CFG = ModelConfig(
    vocab_size=97,
    d_model=20,
    n_layers=2,
    n_q_heads=6,
    n_kv_heads=2,
    head_dim=14,
    n_experts=16,
    experts_per_token=3,
    d_expert=12,
    sliding_window=9,
    dtype="float32",
    swiglu_limit=1.5,
)
B, T, D, E, A, F = 8, 7, 20, 16, 3, 12
MESHES = {  # rows of the buffer, bytes of gathered tokens
    "expert 8": (dict(expert=8), 5, 2**29),  # of at most 112 rows: up to 23 rounds
    "expert 4, tensor 2": (dict(expert=4, tensor=2), None, 2**29),
    "data 2, expert 2, tensor 2": (dict(data=2, expert=2, tensor=2), None, 1000),  # of 2240
}
ROUTINGS = ("uniform", "few", "skewed")
TOKENS = P(("data", "expert"))
EXPERTS = P(("expert", "tensor"))
NAMES = ("y", "h", "weights", "w_gate_up", "b_gate_up", "w_down", "b_down")
exchanged = partial(experts_all_to_all, exchange=partial(emulate_ragged, axis_name=("expert",)))
DISPATCHES = {"gathered": experts_all_gather, "exchanged": exchanged}


def mesh_of(**axes):
    return make_mesh(MeshConfig(**axes), jax.devices()[:8])


def make_layer(dtype=jnp.float32):
    rng = np.random.default_rng(1)
    shapes = dict(w_gate_up=(E, D, 2 * F), b_gate_up=(E, 2 * F), w_down=(E, F, D), b_down=(E, D))
    return {n: jnp.asarray(rng.normal(0, 0.4, s), dtype) for n, s in shapes.items()}


def make_tokens(routing, dtype=jnp.float32):
    """h, indices, weights and what the gradient comes from."""
    rng = np.random.default_rng(2)
    h, dy = (jnp.asarray(rng.normal(size=(B, T, D)), dtype) for _ in range(2))
    indices = np.argsort(rng.random((B, T, E)), axis=-1)[..., :A]
    if routing == "few":  # most devices have no row at all
        indices = np.asarray([1, 6, 13])[np.argsort(rng.random((B, T, 3)), axis=-1)]
    if routing == "skewed":  # two thirds of all rows to one device, on every mesh
        indices = np.broadcast_to([5, 4, 11], indices.shape)
    weights = rng.dirichlet(np.ones(A), (B, T))
    return h, jnp.asarray(indices, jnp.int32), jnp.asarray(weights, jnp.float32), dy


def compute_gradients(fn, h, indices, weights, layer, dy):
    """The sum and all its gradients, by name."""
    y, pull = jax.vjp(lambda h, w, layer: fn(h, indices, w, layer), h, weights, layer)
    dh, dweights, dlayer = pull(dy)
    return {"y": y, "h": dh, "weights": dweights} | dlayer


def dense_experts(h, indices, weights, layer):
    """Every expert for every token, weighted by 0 where it is not active."""
    one_hot = jax.nn.one_hot(indices, E, dtype=h.dtype)
    weights_BTE = jnp.sum(one_hot * weights[..., None].astype(h.dtype), axis=2)
    gate_up = jnp.einsum("btd,edf->btef", h, layer["w_gate_up"]) + layer["b_gate_up"][None, None]
    gate, up = jnp.split(gate_up, 2, axis=-1)
    gate = jnp.minimum(gate, CFG.swiglu_limit)
    up = jnp.clip(up, -CFG.swiglu_limit, CFG.swiglu_limit)
    act = (up + 1) * gate * jax.nn.sigmoid(CFG.swiglu_alpha * gate)
    out = jnp.einsum("btef,efd->bted", act, layer["w_down"]) + layer["b_down"][None, None]
    return jnp.sum(weights_BTE[..., None] * out, axis=2)


plain = jax.jit(partial(compute_gradients, lambda *args: apply_experts(*args, CFG)))
_oracle = jax.jit(partial(compute_gradients, dense_experts))


def oracle_experts(h, indices, weights, layer, dy):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (h, weights, layer, dy))
        h, weights, layer, dy = wide
        return {n: np.asarray(x) for n, x in _oracle(h, indices, weights, layer, dy).items()}


def run_on_mesh(mesh, dispatch, **options):
    """The dispatch on whole arrays of a mesh."""

    def run_shard(h, indices, weights, layer):
        return dispatch(h, indices, weights, layer, CFG, **options)

    return jax.shard_map(
        run_shard,
        mesh=mesh,
        in_specs=(TOKENS, TOKENS, TOKENS, EXPERTS),
        out_specs=TOKENS,
        check_vma=False,
    )


def check_agreement(actual, naive, exact, names=NAMES):
    for name in names:
        three_way(actual[name], naive[name], exact[name], name)


# each mesh and each dispatch once; the others are slow
QUICK = [
    ("expert 8", "gathered"),
    ("expert 4, tensor 2", "exchanged"),
    ("data 2, expert 2, tensor 2", "gathered"),
]


@pytest.mark.parametrize(
    ("mesh", "dispatch"),
    [
        pytest.param(mesh, dispatch, marks=[] if (mesh, dispatch) in QUICK else pytest.mark.slow)
        for mesh in MESHES
        for dispatch in DISPATCHES
    ],
)
def test_experts_on_a_mesh_match_one_device(mesh, dispatch, monkeypatch):
    axes, rows, n_rows = MESHES[mesh]
    monkeypatch.setattr(expert, "MAX_GATHERED_BYTES", n_rows)
    fn = run_on_mesh(mesh_of(**axes), DISPATCHES[dispatch], buffer_rows=rows)
    wrapped = jax.jit(partial(compute_gradients, fn))
    for routing in ROUTINGS:
        h, indices, weights, dy = make_tokens(routing)
        args = h, indices, weights, make_layer(), dy
        check_agreement(wrapped(*args), plain(*args), oracle_experts(*args))


def first_alone(round_fn, _rounds, operands, constants):
    return round_fn(jnp.int32(0), operands, constants)


def run_once(mesh, dispatch):
    """Values alone."""
    h, indices, weights, _ = make_tokens("skewed")
    actual = jax.jit(run_on_mesh(mesh, dispatch))(h, indices, weights, make_layer())
    return {"y": actual}


def without_one(y_CD, weights_NA, arguments):
    row_NA = jnp.where(arguments.row_NA == 0, -1, arguments.row_NA)
    return pairs.combine_rows_of_pairs(y_CD, weights_NA, arguments._replace(row_NA=row_NA))


FAULTS = {
    "the sum over tensor is forgotten": (expert, "_psum_over", lambda x, _: x),
    "a device takes its neighbour's experts": (
        expert,
        "device_index",
        lambda names: exchange.device_index(names) ^ 1,
    ),
    "what does not fit is dropped": (expert, "sum_rounds", first_alone),
    "a row is dropped": (expert, "combine_rows_of_pairs", without_one),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, dispatch",
    [
        *((fault, "gathered") for fault in FAULTS),
        *((fault, "exchanged") for fault in list(FAULTS)[1:3]),
    ],
)
def test_a_planted_fault_is_seen(fault, dispatch, monkeypatch):
    h, indices, weights, dy = make_tokens("skewed")
    args = h, indices, weights, make_layer(), dy
    mesh = mesh_of(expert=4, tensor=2)
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match="y: error"):
        check_agreement(
            run_once(mesh, DISPATCHES[dispatch]), plain(*args), oracle_experts(*args), ("y",)
        )


def test_a_sampler_sends_tokens_over_every_expert_axis():
    mesh = mesh_of(fsdp=2, expert=2, tensor=2)
    ops = sharded_ops(plain_ops(), mesh, CFG, SAMPLING)
    h, indices, weights, dy = make_tokens("uniform")
    args = h, indices, weights, make_layer(), dy
    actual = jax.jit(lambda *args: ops.experts(*args, CFG))(*args[:-1])
    three_way(actual, plain(*args)["y"], oracle_experts(*args)["y"])


@pytest.mark.parametrize(
    "device, options, expected, reason",
    [
        (Target("cpu", "cpu"), {}, experts_all_gather, "no ragged all-to-all for a CPU"),
        (Target("gpu", "NVIDIA H200"), {}, experts_all_to_all, "4 rows there and back are fewer"),
        (Target("gpu", "NVIDIA H200"), dict(shards=2), experts_all_gather, "2 shards are fewer"),
        (Target("gpu", "NVIDIA H200"), dict(decoding=True), experts_all_gather, "decode step"),
        (Target("tpu", "TPU v5 lite"), dict(devices=64), experts_all_gather, "v5e of more than 16"),
        (Target("tpu", "TPU v5 lite"), dict(devices=16), experts_all_to_all, "fewer bytes"),
        (Target("tpu", "TPU v5"), dict(devices=64), experts_all_to_all, "fewer bytes"),
    ],
)
def test_the_transport_of_tokens_is_logged_once(device, options, expected, reason, caplog):
    expert._log_once.cache_clear()
    options = dict(devices=8, shards=8, active=4, decoding=False) | options
    with caplog.at_level(logging.INFO, "jaxmoe.parallel"):
        for _ in range(2):
            dispatch, logged = choose_dispatch(device, **options)
            assert dispatch is expected and reason in logged
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]
