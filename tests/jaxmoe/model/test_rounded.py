# SPDX-License-Identifier: Apache-2.0
"""Experts that every forward reads in four bits: their values, and the gradients of the masters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import mxfp4 as host
from jaxmoe.model import forward, init_params, plain_ops, sequence_logprobs, tiny
from jaxmoe.model.rounded import MATRICES, round_experts
from jaxmoe.rl.scorer import with_rounded
from pallas_kernels.grouped_matmul import Mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from pallas_kernels.grouped_matmul.rounded import is_saturated, read_rounded

E, D, F = 3, 64, 5
CFG = replace(tiny(), dtype="float32")


def draw_matrix(seed=0, scale=0.1):
    return jax.random.normal(jax.random.key(seed), (E, D, F)) * scale


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_values_are_those_that_the_host_packs(dtype):
    w_EDF = draw_matrix()
    values = read_rounded(encode_mxfp4(w_EDF)._replace(master_EDF=w_EDF), dtype)
    assert values.dtype == dtype
    for e in range(E):
        packed = host.blocks_to_halves(*host.encode_blocks(np.asarray(w_EDF[e]).T))
        expected = host.decode_packed(Mxfp4(*(part[None] for part in packed.codes)))[0]
        np.testing.assert_array_equal(
            np.asarray(values[e], np.float32), expected.astype(np.float32)
        )


def test_a_part_of_a_stack_reads_its_matrices():
    stack = jnp.concatenate([draw_matrix(1), draw_matrix(2)])
    packed, part = encode_mxfp4(stack), stack[E:]
    values = read_rounded(packed._replace(first=jnp.int32(E), master_EDF=part), jnp.float32)
    np.testing.assert_array_equal(values, mxfp4_to_dense(encode_mxfp4(part)))


def log_probs(params, tokens_BT, ops):
    hidden_BTD, _, _ = forward(params, tokens_BT, CFG, ops)
    return sequence_logprobs(params, hidden_BTD, tokens_BT, CFG, ops)[0]


@jax.jit
def decode(params):
    def decode_leaf(leaf):
        return mxfp4_to_dense(leaf) if isinstance(leaf, Mxfp4) else leaf

    return jax.tree.map(decode_leaf, params, is_leaf=lambda leaf: isinstance(leaf, Mxfp4))


@pytest.fixture(scope="module")
def weights():
    """Parameters, the same in four bits, and tokens."""
    params = jax.jit(lambda: init_params(jax.random.key(0), CFG))()
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 9), 0, CFG.vocab_size)
    return params, jax.jit(round_experts)(params), tokens_BT


def test_trainer_engine_and_decoded_weights_agree(weights):
    params, packed, tokens_BT = weights
    ops = plain_ops()
    run = jax.jit(lambda p: log_probs(p, tokens_BT, ops))
    trainer, engine, dense = run(with_rounded(params, packed)), run(packed), run(decode(packed))
    np.testing.assert_allclose(trainer, dense, atol=2e-6, rtol=0)
    np.testing.assert_allclose(engine, dense, atol=2e-6, rtol=0)
    assert float(jnp.abs(dense - run(params)).max()) > 1e-3  # rounding is seen


def test_gradients_of_masters_match_unsaturated_decoded_weights(weights):
    params, packed, tokens_BT = weights
    ops = plain_ops()

    def loss(p):
        return log_probs(p, tokens_BT, ops).sum()

    masters = jax.jit(jax.grad(lambda p: loss(with_rounded(p, packed))))(params)
    expected = jax.jit(jax.grad(loss))(decode(packed))
    for kind in ("sliding", "full"):
        for name in MATRICES:
            scales = packed["layers"][kind][name].scales_EDF
            saturated = is_saturated(params["layers"][kind][name], scales)
            layer = jnp.where(saturated, 0.0, expected["layers"][kind][name])
            np.testing.assert_allclose(
                masters["layers"][kind][name], layer, atol=1e-5 * float(jnp.abs(layer).max())
            )
            assert 0.005 < float(saturated.mean()) < 0.05
    np.testing.assert_allclose(
        masters["embed"], expected["embed"], atol=1e-5 * float(jnp.abs(expected["embed"]).max())
    )


def test_no_layer_decodes_all_its_experts(weights):
    """In bfloat16, where nothing else has the shape of the experts' masters."""
    params, packed, tokens_BT = weights
    cfg, ops = replace(CFG, dtype="bfloat16"), plain_ops()

    def loss(p):
        hidden_BTD, _, _ = forward(p, tokens_BT, cfg, ops)
        return sequence_logprobs(p, hidden_BTD, tokens_BT, cfg, ops)[0].sum()

    shapes = [
        f"bf16[{cfg.n_experts},{rows},{columns}]"
        for rows, columns in ((cfg.d_model, 2 * cfg.d_expert), (cfg.d_expert, cfg.d_model))
    ]
    text = str(jax.make_jaxpr(jax.grad(lambda p: loss(with_rounded(p, packed))))(params))
    dense = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert all(shape in dense and shape not in text for shape in shapes)
