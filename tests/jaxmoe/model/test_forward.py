# SPDX-License-Identifier: Apache-2.0
"""One forward for everything: rows do not see each other, nor padding, nor how they were cut."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import forward, init_cache, init_params, plain_ops
from jaxmoe.model.ops import checkpoint_inputs_on_host, checkpoint_keeping_attention
from jaxmoe.model.params import abstract_params
from pallas_kernels import sink_attention
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import pallas_gpu, pallas_tpu, xla
from tests.jaxmoe.random_weights import random_weights
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL
from tests.pallas_kernels.jaxprs import equations

OPS = plain_ops()
CFG = replace(SMALL, n_layers=4)
B, T = 2, 24


@pytest.fixture(scope="module")
def params():
    return random_weights(CFG, 0)


RUN = jax.jit(forward, static_argnums=(2, 3))


def tokens_of(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 97, shape), jnp.int32)


def assert_close(actual, want):
    """float32 summed in another order, through 4 layers: a few hundred roundings."""
    scale = float(np.abs(want).max())
    np.testing.assert_allclose(actual, want, rtol=0, atol=256 * 2.0**-24 * scale)


def run_alone(params, tokens_BT):
    """Hidden states of one sequence; zeros after it, which it cannot see, make one program."""
    length = tokens_BT.shape[1]
    padded = jnp.pad(tokens_BT, ((0, 0), (0, 24 - length)))
    return RUN(params, padded, CFG, OPS)[0][0, :length]


def test_packed_sequences_do_not_see_each_other(params):
    rows = [tokens_of(5, 1, 13), tokens_of(6, 1, 8)]
    packed = jnp.concatenate([*rows, tokens_of(7, 1, 3)], axis=1)
    positions = jnp.asarray([[*range(13), *range(8), 0, 0, 0]], jnp.int32)
    segments = jnp.asarray([[1] * 13 + [2] * 8 + [0] * 3], jnp.int32)
    hidden, _, _ = RUN(params, packed, CFG, OPS, positions_BT=positions, segment_ids_BT=segments)
    for row, alone in zip(rows, (hidden[0, :13], hidden[0, 13:21]), strict=True):
        assert_close(alone, run_alone(params, row))


def test_a_later_token_changes_nothing_before_it(params):
    tokens = tokens_of(8, B, T)
    changed = tokens.at[:, 15].set((tokens[:, 15] + 1) % 97)
    a, b = RUN(params, tokens, CFG, OPS)[0], RUN(params, changed, CFG, OPS)[0]
    np.testing.assert_array_equal(a[:, :15], b[:, :15])
    assert float(jnp.abs(a[:, 15:] - b[:, 15:]).min(axis=(0, 2)).max()) > 0


@pytest.mark.parametrize("cuts", [(1,), (3, 4, 16)])
def test_prefill_in_chunks_and_decode_equal_one_forward(params, cuts):
    tokens = tokens_of(9, B, T)
    want, _, recorded = RUN(params, tokens, CFG, OPS)
    cache, parts, experts = init_cache(CFG, B, 29), [], []
    edges = [0, *cuts, *range(cuts[-1] + 1, T + 1)]
    for start, stop in zip(edges, edges[1:], strict=False):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (B, stop - start))
        hidden, cache, picked = RUN(
            params, tokens[:, start:stop], CFG, OPS, positions_BT=positions, cache=cache
        )
        parts.append(hidden)
        experts.append(picked["experts_BTA"])
    assert_close(jnp.concatenate(parts, axis=1), want)
    np.testing.assert_array_equal(jnp.concatenate(experts, axis=2), recorded["experts_BTA"])
    assert cache is not None and int(cache.used) == T


@pytest.mark.parametrize(
    "time, cached, used", [(1, 1, "decode"), (16, 1, "decode"), (17, 1, "attend"), (5, 0, "attend")]
)
def test_only_few_cached_tokens_use_decoding_kernels(params, time, cached, used):
    calls = []

    def note_calls(name):
        def call(*args, **options):
            calls.append(name)
            return getattr(OPS, name)(*args, **options)

        return call

    ops = replace(OPS, attend=note_calls("attend"), decode=note_calls("decode"))
    cache = init_cache(CFG, B, 29) if cached else None
    jax.eval_shape(
        lambda p, t: forward(p, t, CFG, ops, cache=cache)[0], params, tokens_of(9, B, time)
    )
    assert set(calls) == {used} and len(calls) == 2


def test_right_padded_rows_decode_as_if_unbatched(params):
    lengths, tokens = np.array([6, 14]), tokens_of(10, B, 14)
    answers = tokens_of(11, B, 10)
    segments = (jnp.arange(14)[None] < lengths[:, None]).astype(jnp.int32)
    cache = init_cache(CFG, B, 29)
    _, cache, _ = RUN(params, tokens, CFG, OPS, segment_ids_BT=segments, cache=cache)
    parts = []
    for t in range(10):
        hidden, cache, _ = RUN(
            params,
            answers[:, t : t + 1],
            CFG,
            OPS,
            cache=cache,
            positions_BT=jnp.asarray(lengths + t, jnp.int32)[:, None],
        )
        parts.append(hidden)
    decoded = jnp.concatenate(parts, axis=1)
    for b, n in enumerate(lengths):
        sequence = jnp.concatenate([tokens[b, :n], answers[b]])[None]
        assert_close(decoded[b], run_alone(params, sequence)[n:])


def compute_gradient(params, remat):
    """Return the gradient of a sum over hidden states, with layers rematerialized by `remat`."""
    tokens, ops = tokens_of(12, B, T), replace(OPS, remat=remat)

    def loss(params):
        return jnp.sum(jnp.sin(forward(params, tokens, CFG, ops)[0]))

    return jax.jit(jax.grad(loss))(params)


@pytest.fixture(scope="module")
def count_recomputed(params):
    return compute_gradient(params, jax.checkpoint)


@pytest.mark.slow  # test_layer_plan.py has the gradients of unrolled layers
@pytest.mark.parametrize("remat", [OPS.remat, checkpoint_keeping_attention])
def test_recomputing_layers_gives_the_same_gradient(params, count_recomputed, remat):
    saved = compute_gradient(params, remat)
    for a, b in zip(jax.tree.leaves(count_recomputed), jax.tree.leaves(saved), strict=True):
        assert_close(a, np.asarray(b))
    del saved["head"]  # it comes after the forward
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(saved))


@pytest.mark.slow
def test_where_a_layers_inputs_wait_changes_no_bit(params, count_recomputed):
    jax.tree.map(
        np.testing.assert_array_equal,
        compute_gradient(params, checkpoint_inputs_on_host),
        count_recomputed,
    )


@pytest.mark.parametrize(
    "name", ["xla", "mosaic_tpu", pytest.param("mosaic_gpu", marks=pytest.mark.slow)]
)
def test_attention_that_is_kept_is_not_run_again(params, monkeypatch, name):
    """The backward of the two layers in a scanned pair asks for their forwards only where all is
    recomputed; counted in the gradient's program by a function of its own."""
    module, part = {
        "xla": (xla, "_forward_blocks"),
        "mosaic_tpu": (pallas_tpu, "attention_forward_tpu"),
        "mosaic_gpu": (pallas_gpu, "attention_forward_gpu"),
    }[name]
    inner = getattr(module, part)

    def count_calls(*args, **options):
        def attention_forward(out):
            return jax.tree.map(jnp.negative, out)

        return jax.jit(attention_forward)(inner(*args, **options))

    monkeypatch.setattr(module, part, count_calls)

    def attend(q, k, v, sink, *, window, **places):
        if name == "xla":
            return sink_attention(q, k, v, sink, window=window, impl="xla", **places)
        layout = Layout(**places)
        if name == "mosaic_tpu":
            return pallas_tpu.sink_attention_mosaic_tpu(
                q, k, v, sink, layout, window or 0, 0.25, True
            )
        return pallas_gpu.sink_attention_mosaic_gpu(q, k, v, sink, layout, window or 0, 0.25)

    def count_runs(remat):
        ops = replace(OPS, attend=attend, remat=remat)

        def loss(params):
            return jnp.sum(jnp.sin(forward(params, tokens_of(12, B, T), cfg, ops)[0]))

        names = [
            e.params.get("name") for e in _live_bytes(jax.make_jaxpr(jax.grad(loss))(shapes).jaxpr)
        ]
        return names.count("attention_forward")

    cfg, shapes = CFG, params
    if name == "mosaic_gpu":
        cfg = replace(CFG, dtype="bfloat16", head_dim=64)
        shapes = abstract_params(cfg)
    plain, saved, count_recomputed = map(
        count_runs, (OPS.remat, checkpoint_keeping_attention, jax.checkpoint)
    )
    assert plain == saved == count_recomputed - 2 > 0


def _live_bytes(jaxpr):
    """Equations whose results somebody reads; compilers drop the others."""
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if not eqn.outvars or any(id(v) in read for v in eqn.outvars):
            yield eqn
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _live_bytes(inner)


def test_the_program_does_not_grow_with_the_layers():
    counts = []
    for n_layers in (2, 6):
        cfg = replace(CFG, n_layers=n_layers)
        shapes = jax.eval_shape(lambda cfg=cfg: init_params(jax.random.key(0), cfg))
        tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda p, t, cfg=cfg: forward(p, t, cfg, OPS)[0])(shapes, tokens)
        counts.append(len(list(equations(jaxpr.jaxpr))))
    assert counts[0] == counts[1] > 50
