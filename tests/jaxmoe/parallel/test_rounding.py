# SPDX-License-Identifier: Apache-2.0
"""Experts rounded on a mesh: bytes, gradients and steps of one device, and no master gathered."""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from jaxmoe.batches.batch import Batch
from jaxmoe.config import MeshConfig, ModelConfig, OptimConfig
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.rounded import MATRICES, map_experts, round_experts
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.rounding import exchange_rows_for_columns, shard_rounding
from jaxmoe.parallel.sharding import make_mesh, param_shardings, shard_batch, state_shardings
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.scorer import Scorer, with_rounded
from jaxmoe.rl.state import Frozen, Trained, init_state
from jaxmoe.rl.terms import kl_term
from jaxmoe.rl.update import jit_step
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from pallas_kernels.grouped_matmul.mxfp4_scales import choose_least_error_exponent
from pallas_kernels.grouped_matmul.mxfp4_stochastic import round_stochastically
from pallas_kernels.grouped_matmul.rounded import is_saturated
from tests.jaxmoe.parallel.collectives import beside_loops, list_collectives
from tests.jaxmoe.random_weights import random_weights

pytestmark = pytest.mark.usefixtures("standard_promotion")

CFG = ModelConfig(
    vocab_size=120,
    vocab_multiple=16,
    d_model=192,
    n_layers=4,
    n_q_heads=4,
    n_kv_heads=2,
    head_dim=16,
    n_experts=4,
    experts_per_token=2,
    d_expert=64,
    sliding_window=9,
    dtype="float32",
)
KINDS = "sliding", "full"
# Of 192 rows a device of eight has 24, which cuts groups of 32.
MESHES = [
    {"fsdp": 8},
    {"fsdp": 4, "sequence": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 4, "expert": 2},
]
round_otherwise = partial(
    map_experts,
    partial(
        encode_mxfp4,
        choose_exponent=choose_least_error_exponent,
        round_magnitude=round_stochastically,
    ),
)
RULES = "nearest", "least_error_stochastic"


@cache
def draw_params():
    """Weights with zeros, and values so small that a float comparison would flush them."""
    params = random_weights(CFG, 0)
    for kind in KINDS:
        layer = params["layers"][kind]
        for name in MATRICES:
            w = layer[name].at[0, 1].multiply(1e-39).at[1, 2, 32:64].set(0.0)
            layer[name] = w.at[1, 3, 5].multiply(4.0)
    return params


def shard_params(mesh):
    return jax.device_put(draw_params(), param_shardings(CFG, mesh))


@cache
def round_on_one_device(round_params):
    return jax.jit(round_params)(draw_params())


@pytest.mark.parametrize(
    "sizes, round_params",
    [
        pytest.param(sizes, rule, id=f"{sizes}-{name}", marks=[pytest.mark.slow] * (i % 2 != j))
        for i, sizes in enumerate(MESHES)
        for j, (name, rule) in enumerate(zip(RULES, (round_experts, round_otherwise), strict=True))
    ],
)
def test_bytes_equal_one_devices_within_each_devices_share(sizes, round_params):
    mesh = make_mesh(MeshConfig(**sizes))
    params = shard_params(mesh)
    compiled = jax.jit(shard_rounding(round_params, CFG, mesh)).lower(params).compile()
    packed, expected = compiled(params), round_on_one_device(round_params)
    for kind in KINDS:
        for name in MATRICES:
            master = params["layers"][kind][name].addressable_shards[0].data.size
            both = (tree["layers"][kind][name].codes for tree in (packed, expected))
            for part, other, values_per_entry in zip(*both, (2, 32), strict=True):
                np.testing.assert_array_equal(part, other)
                shard = part.addressable_shards[0].data
                assert shard.size * values_per_entry == master
                assert (
                    shard.shape[2] * values_per_entry
                    == draw_params()["layers"][kind][name].shape[2]
                )  # rows are complete
    largest = max(
        x.addressable_shards[0].data.nbytes
        for kind in KINDS
        for x in jax.tree.leaves(params["layers"][kind])
    )
    sent = list_collectives(compiled.as_text())
    assert {kind for kind, _ in sent} <= {"all-to-all"} and all(n <= largest for _, n in sent)
    assert sent or "fsdp" not in sizes


def test_values_in_the_models_dtype_are_rounded():
    """An engine that reads no four bits gets them so."""
    mesh = make_mesh(MeshConfig(fsdp=8))

    def double(params):
        return jax.tree.map(lambda x: 2 * x, params)

    doubled = shard_rounding(double, CFG, mesh)(shard_params(mesh))
    np.testing.assert_array_equal(
        doubled["layers"]["full"]["w_gate_up"], 2 * draw_params()["layers"]["full"]["w_gate_up"]
    )
    assert doubled["embed"] is not None and (doubled["embed"] == draw_params()["embed"]).all()
    assert shard_rounding(None, CFG, mesh) is None


def sum_log_probs(params, packed, tokens_BT, ops):
    read = with_rounded(params, packed)
    hidden_BTD, _, _ = forward(read, tokens_BT, CFG, ops)
    return sequence_logprobs(read, hidden_BTD, tokens_BT, CFG, ops)[0].sum()


def compute_gradients(sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    params = draw_params() if mesh is None else shard_params(mesh)
    tokens_BT = jax.random.randint(jax.random.key(1), (8, 10), 0, CFG.vocab_size)
    packed = jax.jit(shard_rounding(round_experts, CFG, mesh))(params)
    fn = partial(sum_log_probs, ops=sharded_ops(plain_ops(), mesh, CFG))
    value_and_grad = jax.jit(jax.value_and_grad(fn))
    return value_and_grad(params, packed, shard_batch(tokens_BT, mesh))


@pytest.mark.slow  # compiles two gradients
def test_gradients_of_masters_match_one_device_and_saturation():
    (expected, one), (value, several) = (
        compute_gradients(sizes) for sizes in ({}, {"fsdp": 4, "expert": 2})
    )
    assert abs(float(value) - float(expected)) < 1e-4 * abs(float(expected))
    packed = round_experts(draw_params())
    for kind in KINDS:
        for name in MATRICES:
            a, b = (np.asarray(tree["layers"][kind][name]) for tree in (one, several))
            np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(a).max())
            saturated = is_saturated(
                draw_params()["layers"][kind][name], packed["layers"][kind][name].scales_EDF
            )
            assert np.asarray(saturated).any() and (b[np.asarray(saturated)] == 0).all()
    np.testing.assert_allclose(one["embed"], several["embed"], atol=3e-4)


B, T = 16, 24
# Of two layers: on CPU devices loops with collectives may wait for each other.
TWO = replace(CFG, n_layers=2)
N_VALUES = 2 * CFG.n_experts * 3 * CFG.d_model * CFG.d_expert
KL = Algorithm(old_logp="recomputed", terms=(kl_term(0.1),))
METRICS = (
    "loss",
    "policy/entropy",
    "grad/norm",
    "quant/moved_frac",
    "quant/saturated_frac",
    "quant/relative_error",
)


def make_batch(seed):
    dice = np.random.default_rng(seed)
    mask = np.broadcast_to(np.arange(T)[None] >= 8, (B, T))
    return Batch(
        tokens_BT=dice.integers(0, CFG.vocab_size, (B, T)).astype(np.int32),
        positions_BT=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        segment_ids_BT=np.ones((B, T), np.int32),
        loss_mask_BT=mask,
        rollout_logp_BT=np.where(mask, -4.8, 0.0).astype(np.float32),
        rewards_B=dice.normal(size=B).astype(np.float32),
        samples_per_prompt=4,
    )


def run_steps(sizes, steps, round_params):
    """Metrics of RL steps, with a reference that is packed too, and the largest gather."""
    mesh, tx = (
        make_mesh(MeshConfig(**sizes)),
        make_optimizer(OptimConfig(lr=1e-3, eps=1e-5), steps=9),
    )
    params = random_weights(TWO, 0)
    state = init_state(Trained(params), tx, Frozen(jax.tree.map(lambda x: 1.1 * x, params)))
    pins, place = {}, None
    if mesh is not None:
        shardings = state_shardings(state, TWO, mesh)
        state, pins = jax.device_put(state, shardings), {"out_shardings": (shardings, None, None)}
        place = partial(exchange_rows_for_columns, cfg=TWO, mesh=mesh)
    scorer = Scorer(
        TWO,
        sharded_ops(plain_ops(), mesh, TWO),
        place_masters=place,
        round_params=shard_rounding(round_params, TWO, mesh),
    )
    step = jit_step(tx=tx, algorithm=KL, scorer=scorer, donate_argnums=0, **pins)
    step = step.lower(state, shard_batch(make_batch(0), mesh)).compile()
    rows, sent = [], []
    if mesh is not None:
        assert not beside_loops(step.as_text())
        sent = list_collectives(step.as_text())
    for seed in range(steps):
        state, metrics, _ = step(state, shard_batch(make_batch(seed), mesh))
        rows.append([float(metrics[name]) for name in METRICS])
    return np.array(rows), max((n for kind, n in sent if kind == "all-gather"), default=0)


# Masters whose last bits differ are drawn anew, so stochastic rounding agrees on the bytes that the
# first step reads; on those after it, as two draws of all values do: to five standard errors.
@pytest.mark.parametrize(
    "round_params, steps, tolerance_after",
    [(round_experts, 3, 2e-5), (round_otherwise, 1, 5 / N_VALUES**0.5)],
    ids=RULES,
)
@pytest.mark.slow  # compiles two steps
def test_steps_match_one_device_and_gather_no_masters(round_params, steps, tolerance_after):
    (expected, _), (actual, gathered) = (
        run_steps(sizes, steps, round_params) for sizes in ({}, {"fsdp": 4, "sequence": 2})
    )
    error = np.abs(actual - expected)
    assert error[:, :3].max() < 2e-5 and error[:, 3:].max() < tolerance_after
    assert (expected[:, 3] > 0).all()
    # The head is the largest array that is gathered: half of the smaller experts' masters.
    assert gathered <= 4 * TWO.d_model * TWO.padded_vocab
    assert gathered < 4 * TWO.n_experts * TWO.d_model * TWO.d_expert
