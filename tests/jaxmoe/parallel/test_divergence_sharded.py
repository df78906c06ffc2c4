# SPDX-License-Identifier: Apache-2.0
"""Divergences from a teacher, and logits of listed words, over eight devices and on one."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import MeshConfig
from jaxmoe.model.layers import token_divergences
from jaxmoe.model.ops import plain_ops
from jaxmoe.parallel import vocabulary
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh
from pallas_kernels.token_logprobs import listed_logits
from tests.jaxmoe.small_models import SEVEN_EXPERTS

B, T, D, V = 8, 6, 24, 2400
CFG = replace(SEVEN_EXPERTS, vocab_size=V - 5, vocab_multiple=100, d_model=D)
MESHES = {
    "fsdp": MeshConfig(fsdp=8),
    "expert": MeshConfig(fsdp=2, expert=2, tensor=2),
    "sequence": MeshConfig(fsdp=2, sequence=2, tensor=2),
}
U, K, TEMPERATURE = 40, 5, 0.7
SHAPES = (B, T, D), (D, V), (B, T, U), (U, V)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vocabulary, "MAX_CHUNK_ELEMENTS", (D + U) * 8 * vocabulary.ALIGN_COLUMNS)


def draw_arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, SHAPES, strict=False)]
    scales = (1.0, D**-0.5, 1.0, U**-0.5)
    return [s * x for s, x in zip(scales, arrays, strict=True)], jax.random.normal(
        keys[4], (2, B, T)
    )


def values_and_gradients(divergences):
    arrays, cotangents = draw_arrays()

    def run(*arrays):
        out, pull = jax.vjp(
            lambda *x: divergences(*x, temperature=jnp.float32(TEMPERATURE), vocab_size=V - 5),
            *arrays,
        )
        return *out, *pull(tuple(cotangents))

    return jax.jit(run)(*arrays)


@pytest.mark.parametrize("name", MESHES)
def test_a_meshs_divergences_are_those_of_one(name):
    ops = sharded_ops(plain_ops(), make_mesh(MESHES[name]), CFG)
    names = "reverse", "forward", "dhidden", "dhead", "dteacher", "dteacher_head"
    want = values_and_gradients(token_divergences)
    for name, x, y in zip(names, values_and_gradients(ops.divergences), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=name)
    assert float(want[0].min()) > 0.1 and not any(np.asarray(x).any() for x in want[4:])


def test_an_equal_teacher_has_divergence_zero_sharded():
    ops = sharded_ops(plain_ops(), make_mesh(MESHES["fsdp"]), CFG)
    (hidden, head, *_), _ = draw_arrays()

    def run(hidden, head):
        out, pull = jax.vjp(
            lambda h, w: ops.divergences(h, w, hidden, head, temperature=1.0, vocab_size=V - 5),
            hidden,
            head,
        )
        return *out, *pull(out)

    for x in jax.jit(run)(hidden, head):
        assert not np.asarray(x).any()


def draw_lists():
    """Words of every shard, the last word, and entries without one."""
    ids = np.random.default_rng(0).random((B, T, V - 5)).argsort(axis=-1)[..., :K]
    ids[0, 0, :3], ids[1, 1, 2:] = (0, V // 8 - 1, V - 6), -1
    return jnp.asarray(ids, jnp.int32)


def listed_values_and_gradients(run_op):
    (hidden, head, *_), cotangents = draw_arrays()
    ids, dwords = draw_lists(), jax.random.normal(jax.random.key(6), (B, T, K))

    def run(hidden, head):
        options = {"temperature": jnp.float32(TEMPERATURE), "vocab_size": V - 5}
        out, pull = jax.vjp(lambda *x: run_op(*x, ids, **options), hidden, head)
        return *out, *pull((dwords, cotangents[0]))

    return jax.jit(run)(hidden, head)


@pytest.mark.parametrize("name", [*MESHES, "own"])
def test_a_meshs_listed_logits_are_those_of_one(name):
    own = partial(listed_logits)  # an op of the user's, which gets the complete head
    one = replace(plain_ops(), listed_logits=own) if name == "own" else plain_ops()
    ops = sharded_ops(one, make_mesh(MESHES.get(name, MESHES["expert"])), CFG)
    want = listed_values_and_gradients(listed_logits)
    got = listed_values_and_gradients(ops.listed_logits)
    for name, x, y in zip(("words", "rest", "dhidden", "dhead"), got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=name)
    assert (np.asarray(got[0])[1, 1, 2:] == np.float32(-1e30)).all()
