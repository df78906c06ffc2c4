# SPDX-License-Identifier: Apache-2.0
"""The oracle of sink attention: values and derivative in float64, and the comparison with them."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sink_attention import sink_attention
from tests.pallas_kernels.three_way import three_way

NAMES = ("o", "lse", "dq", "dk", "dv", "dsink")
PLACES = (
    "q_positions_BT",
    "k_positions_BS",
    "q_segment_ids_BT",
    "k_segment_ids_BS",
    "k_last_segment_ids_BS",
)


@cache
def public(impl="xla", function=sink_attention):
    """The public function of a window, q, k, v, the sink and the places of each token."""

    def attend(window, q, k, v, sink, *places):
        layout = dict(zip(PLACES, places, strict=False))
        return function(q, k, v, sink, **layout, window=window or None, impl=impl)

    return attend


def visible(case, inputs):
    """The keys that each query sees, [B, T, S]: an independent implementation of the predicate."""
    q_pos, k_pos, q_seg, k_seg, *shared = map(np.asarray, inputs[4:])
    last = shared[0] if shared else k_seg
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    reaches = (k_seg[:, None, :] <= q_seg[:, :, None]) & (q_seg[:, :, None] <= last[:, None, :])
    mask = reaches & (k_seg[:, None, :] > 0) & (distance >= 0)
    return mask & ((distance < case.window) | (case.window == 0))


def formula(case, dout, dlse, *inputs, scale=None, wide: Any = np.float64, rounded=lambda x: x):
    """Values and every gradient from the written-out derivative; `rounded` after each product."""
    q, k, v, sink, dout, dlse = (
        np.asarray(x.astype(jnp.float32)).astype(wide) for x in (*inputs[:4], dout, dlse)
    )
    (B, _, N, H), (S, K) = q.shape, k.shape[1:3]
    scale = wide(case.H**-0.5 if scale is None else scale)

    def product(dims, a, b):
        return rounded(np.einsum(dims, rounded(a), rounded(b)))

    wide_k, wide_v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    mask, sink = visible(case, inputs)[:, None], sink[None, :, None]
    z = np.where(mask, product("btnh,bsnh->bnts", q, wide_k) * scale, -np.inf)
    top = np.maximum(z.max(-1, initial=-1e30), sink)
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(z - top[..., None]).sum(-1) + np.exp(sink - top))
    safe = np.where(np.isfinite(lse), lse, 0)
    p = np.exp(z - safe[..., None])
    o = product("bnts,bsnh->btnh", p, wide_v)
    delta = np.einsum("btnh,btnh->bnt", dout, o) - dlse.transpose(0, 2, 1)
    dz = p * (product("btnh,bsnh->bnts", dout, wide_v) - delta[..., None]) * scale
    dsink = -(np.exp(sink - safe) * delta).sum((0, 2))

    def per_key_head(x):
        return rounded(x.reshape(B, S, K, N // K, H).sum(3))

    dk = per_key_head(product("bnts,btnh->bsnh", dz, q))
    dv = per_key_head(product("bnts,btnh->bsnh", p, dout))
    return o, lse.transpose(0, 2, 1), product("bnts,bsnh->btnh", dz, wide_k), dk, dv, dsink


def naive(case, dtype, *args, scale=None):
    """The formula as a plain program computes it: matmuls in `dtype`, the rest in float32."""
    rounded = lambda x: np.asarray(x, dtype).astype(np.float32)  # noqa: E731
    return formula(case, *args, scale=scale, wide=np.float32, rounded=rounded)


def cotangents(case, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(9))
    dout = jax.random.normal(keys[0], (case.B, case.T, case.N, case.H)).astype(dtype)
    return dout, jax.random.normal(keys[1], (case.B, case.T, case.N))


@partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(f, window, dout, dlse, q, k, v, sink, *places):
    out, pull = jax.vjp(lambda *args: f(window, *args, *places), q, k, v, sink)
    return *out, *pull((dout, dlse))


def rounding_of_dsink(case, dtype, inputs, ct, o, lse, scale=None):
    """Standard deviation of dsink when weights and outputs are rounded to `dtype`, as any forward
    leaves them: each rounding is even over ±eps/2 of its number, and Δ = Σ dO∘o adds them up."""
    q, k, v, sink, dout = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (*inputs[:4], ct[0])
    )
    k, v = (np.repeat(x, case.N // case.K, axis=2) for x in (k, v))
    has_weights = np.isfinite(lse)
    safe = np.where(has_weights, lse, 0.0)
    z = np.einsum("btnh,bsnh->bnts", q, k) * (case.H**-0.5 if scale is None else scale)
    z = np.where(visible(case, inputs)[:, None], z, -np.inf)
    p_dp = np.exp(z - safe.transpose(0, 2, 1)[..., None]) * np.einsum("btnh,bsnh->bnts", dout, v)
    spread = np.sum((dout * o) ** 2, 3) + np.sum(p_dp**2, 3).transpose(0, 2, 1)
    p_sink = np.where(has_weights, np.exp(sink - safe), 0.0)
    return float(jnp.finfo(dtype).eps) / 12**0.5 * np.sqrt(np.sum(p_sink**2 * spread, (0, 1)))


def compare(case, actual, inputs, ct, simple=None, exact=None, scale=None, exponent=0.0):
    """The three-way rule for values and gradients; `simple` and `exact` in place of those here.

    With scores of size `exponent` float32's weights, and what is summed of them, err by as many
    ulp.
    """
    dtype = ct[0].dtype
    exact = formula(case, *ct, *inputs, scale=scale) if exact is None else exact
    simple = naive(case, dtype, *ct, *inputs, scale=scale) if simple is None else simple
    half = dtype != jnp.float32
    # dk, dv and dsink are float32 sums of many terms: their order alone is worth √terms / 2 ulp
    terms = 0 if half else case.T * case.N // case.K
    for name, actual_x, plain, expected_x in zip(NAMES, actual, simple, exact, strict=True):
        if name != "dsink" or not half:
            eps = float(jnp.finfo(actual_x.dtype).eps)
            weights = exponent * float(np.finfo(np.float32).eps) / eps * (name != "lse")
            ulps = 2 + 0.5 * terms**0.5 + weights
            three_way(actual_x, plain, expected_x, f"{case.name} {name}", ulps=ulps)
    if half:  # few heads: the plain program's own dsink may be right by luck
        sigma = rounding_of_dsink(case, dtype, inputs, ct, exact[0], exact[1], scale)
        largest = np.max(np.abs(exact[1]), where=np.isfinite(exact[1]), initial=0.0)
        # e^{sink − lse} is as exact as lse is: |lse| ulp
        room = 5 * sigma + (4 + largest) * np.finfo(np.float32).eps * np.abs(exact[-1])
        error = np.abs(np.asarray(actual[-1], np.float64) - exact[-1])
        assert np.all(error <= room), f"{case.name} dsink: error {error}, room {room}"


def check_empty(attend, head_size):
    """Check results without keys and without queries; attend(window, q, k, v, sink, *layout)."""
    q, kv = jnp.ones((2, 3, 4, head_size)), jnp.ones((2, 3, 2, head_size))
    sink, place = jnp.arange(4.0), jnp.ones((2, 3), jnp.int32)
    none = place[:, :0]
    o, lse = attend(0, q, kv[:, :0], kv[:, :0], sink, place, none, place, none)
    assert not o.any() and (lse == sink[None, None]).all()
    o, lse = attend(0, q[:, :0], kv, kv, sink, none, place, none, place)
    assert o.shape == (2, 0, 4, head_size) and lse.shape == (2, 0, 4)
