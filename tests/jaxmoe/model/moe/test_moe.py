# SPDX-License-Identifier: Apache-2.0
"""The router and the experts against the formula, dense and in float64."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.model import make_ops, plain_ops
from jaxmoe.model.moe.block import moe_block
from jaxmoe.model.moe.experts import apply_experts, make_chunked_experts
from jaxmoe.model.moe.router import route_top_k
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL
from tests.pallas_kernels.three_way import three_way

CFG = replace(SMALL, swiglu_limit=1.5)
M, D, E, A, F = 29, 48, 7, 4, 40
EPS = float(np.finfo(np.float32).eps)


def layer(seed=0):
    rng = np.random.default_rng(seed)
    shapes = dict(
        moe_norm=(D,),
        w_router=(D, E),
        b_router=(E,),
        w_gate_up=(E, D, 2 * F),
        b_gate_up=(E, 2 * F),
        w_down=(E, F, D),
        b_down=(E, D),
    )
    return {n: jnp.asarray(rng.normal(0, 0.3, s), jnp.float32) for n, s in shapes.items()}


def make_hidden(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(5).normal(size=(M, D)), dtype)[None]


def dense_experts(h, indices, weights, p, dtype=np.float64):
    h, indices, weights = (np.asarray(x[0]) for x in (h, indices, weights))
    h, weights = h.astype(dtype), weights.astype(dtype)
    p = {n: np.asarray(x, dtype) for n, x in p.items()}
    y = np.zeros((M, D), dtype)
    for m in range(M):
        for e, weight in zip(indices[m], weights[m], strict=True):
            gate_up = h[m] @ p["w_gate_up"][e] + p["b_gate_up"][e]
            gate = np.minimum(gate_up[:F], dtype(CFG.swiglu_limit))
            up = np.clip(gate_up[F:], dtype(-CFG.swiglu_limit), dtype(CFG.swiglu_limit))
            act = (up + dtype(1)) * gate / (dtype(1) + np.exp(dtype(-CFG.swiglu_alpha) * gate))
            y[m] += weight * (act @ p["w_down"][e] + p["b_down"][e])
    return y[None]


def test_the_router_selects_top_k_before_the_softmax():
    p, h = layer(), make_hidden()
    indices, weights = route_top_k(h, p, active=A)
    logits = np.asarray(h, np.float64) @ np.asarray(p["w_router"], np.float64)
    logits = logits + np.asarray(p["b_router"], np.float64)
    want = np.argsort(-logits, axis=-1)[..., :A]
    np.testing.assert_array_equal(indices, want)
    top = np.exp(np.take_along_axis(logits, want, -1))
    np.testing.assert_allclose(weights, top / top.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(weights).sum(axis=-1), 1.0, atol=4 * 2.0**-24)


def test_router_weights_and_gradients_accept_any_logits():
    """Ties, logits of ±1e4 and rows of nothing: the softmax over the chosen and its derivative."""
    for size in (0.0, 30.0, 1e4):
        p = layer() | {"b_router": jnp.asarray(np.linspace(-size, size, E), jnp.float32)}
        h, dy = make_hidden() * size, np.random.default_rng(6).normal(size=(1, M, A))
        (indices, weights), pull = jax.vjp(lambda h, p=p: route_top_k(h, p, active=A), h)
        (dh,) = pull((np.zeros(indices.shape, jax.dtypes.float0), jnp.asarray(dy, jnp.float32)))
        w_router = np.asarray(p["w_router"], np.float64)
        z = np.asarray(h, np.float64) @ w_router + np.asarray(p["b_router"], np.float64)
        top = np.take_along_axis(z, np.asarray(indices), -1)
        want = np.exp(top - top.max(-1, keepdims=True))
        want /= want.sum(-1, keepdims=True)
        error = EPS * D * (1 + np.abs(z).max())  # of a logit, and so of what it exponentiates to
        np.testing.assert_allclose(weights, want, atol=error, rtol=0)
        dz = np.zeros(z.shape)
        slope = want * (dy - (want * dy).sum(-1, keepdims=True))
        np.put_along_axis(dz, np.asarray(indices), slope, -1)
        np.testing.assert_allclose(dh, dz @ w_router.T, atol=4 * error * np.abs(dy).max(), rtol=0)


def test_the_router_is_float32_in_a_bfloat16_model():
    p, h = layer(), make_hidden(jnp.bfloat16)
    # logits that bfloat16 cannot tell apart: 256 and 256.5
    p |= {"w_router": jnp.zeros((D, E)), "b_router": 256.0 + 0.5 * jnp.arange(E, dtype=jnp.float32)}
    indices, weights = route_top_k(h, p, active=A)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(indices, np.tile([6, 5, 4, 3], (1, M, 1)))
    want = np.exp(-0.5 * np.arange(A)) / np.exp(-0.5 * np.arange(A)).sum()
    np.testing.assert_allclose(weights, np.tile(want, (1, M, 1)), rtol=1e-6)


@pytest.mark.parametrize("busy", [False, True])
def test_experts_equal_the_dense_formula(busy):
    """No token is dropped where all choose the same experts."""
    p, h = layer(), make_hidden()
    indices, weights = route_top_k(h, p, active=A)
    if busy:
        indices = jnp.tile(jnp.asarray([[[2, 0, 5, 1]]], jnp.int32), (1, M, 1))
    actual = jax.jit(apply_experts, static_argnums=4)(h, indices, weights, p, CFG)
    oracle = dense_experts(h, indices, weights, p)
    naive = dense_experts(h, indices, weights, p, np.float32)
    few = 16 * 2.0**-24 * np.abs(oracle).max()
    assert np.abs(actual - oracle).max() <= 2 * np.abs(naive - oracle).max() + few


def test_the_block_adds_residuals_and_records_experts():
    p = layer()
    x = make_hidden()
    shapes = []

    def no_experts(h_BTD, indices_BTA, weights_BTA, layer, cfg):
        shapes.append(indices_BTA)
        return jnp.zeros_like(h_BTD)

    y, recorded = moe_block(x, p, CFG, replace(plain_ops(), experts=no_experts), routed_BTA=None)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(recorded["experts_BTA"], shapes[0])


TOKENS = 8  # of a chunk: four of them, and three tokens too many in the last
NAMES = ("h", "weights", "w_gate_up", "b_gate_up", "w_down", "b_down")


@cache
def jit_gradients(run, dtype=jnp.float32):
    """Values and gradients, compiled."""
    cfg, p, h = replace(CFG, dtype=jnp.dtype(dtype).name), layer(), make_hidden(dtype)
    indices, weights = route_top_k(h, p, active=A)
    matrices = {name: p[name].astype(dtype) for name in NAMES[2:]}
    dy = jax.random.normal(jax.random.key(3), h.shape).astype(dtype)

    def run_both(h, weights, matrices):
        out, pull = jax.vjp(
            lambda h, weights, m: run(h, indices, weights, p | m, cfg), h, weights, matrices
        )
        return out, *pull(dy)

    arguments = h, weights, matrices
    compiled = jax.jit(run_both).lower(*arguments).compile()
    return compiled.as_text(), compiled(*arguments)


chunked = make_chunked_experts(apply_experts, TOKENS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_chunked_gradients_are_as_good_as_unchunked(dtype):
    """Gradients of tokens, routing weights, and the matrices that all chunks share."""
    expected = jax.tree.leaves(jit_gradients(apply_experts)[1])
    actual, plain = (
        jax.tree.leaves(jit_gradients(run, dtype)[1]) for run in (chunked, apply_experts)
    )
    assert len(actual) == 1 + len(NAMES)
    for x, naive, oracle in zip(actual, plain, expected, strict=True):
        if dtype == jnp.bfloat16:  # four chunks' sums are rounded, where one was
            three_way(x, naive, oracle, ulps=8)
        else:
            np.testing.assert_allclose(x, oracle, rtol=1e-5, atol=1e-5)


def test_no_array_of_all_expert_rows_is_made():
    rows = f"[{M * A},"
    assert (
        rows not in jit_gradients(chunked)[0]
        and f"[{TOKENS * A},{2 * F}]" in jit_gradients(chunked)[0]
    )
    assert f"[{M * A},{2 * F}]" in jit_gradients(apply_experts)[0]
    saved = f"[{-(-M // TOKENS)},{TOKENS * A},"  # of all chunks, for the backward pass
    assert saved not in jit_gradients(chunked)[0]


def test_few_tokens_have_the_program_without_chunks():
    p, h = layer(), make_hidden()
    indices, weights = route_top_k(h, p, active=A)

    def lower_text(run):
        f = partial(run, layer=p, cfg=CFG)
        return str(jax.make_jaxpr(f)(h, indices, weights))

    assert (
        lower_text(make_chunked_experts(apply_experts, M))
        == lower_text(apply_experts)
        != lower_text(chunked)
    )
    assert D == h.shape[-1]


def test_the_config_sets_the_chunk_size():
    cfg = load_config("tiny.py")
    assert make_ops(cfg, {}).experts is apply_experts
    assert make_ops(override(cfg, "optim.expert_tokens=64"), {}).experts is not apply_experts
    with pytest.raises(ConfigError, match=r"expert_tokens must be 0 or more.*expert_tokens=1024"):
        override(cfg, "optim.expert_tokens=-1")
