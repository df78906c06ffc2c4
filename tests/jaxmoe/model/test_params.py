# SPDX-License-Identifier: Apache-2.0
"""The one table: counts of the released models, shapes, initial values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import ModelConfig
from jaxmoe.model import (
    abstract_params,
    count_params,
    forward,
    gpt_oss_20b,
    gpt_oss_120b,
    init_params,
    plain_ops,
    sequence_logprobs,
    tiny,
)
from jaxmoe.model.params import Spec, cast_for_forward, map_specs, param_specs
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL

CFG = replace(SMALL, n_layers=6, n_q_heads=15, vocab_multiple=64, dtype="bfloat16")


def list_specs(cfg):
    return jax.tree.leaves(param_specs(cfg), is_leaf=lambda x: isinstance(x, Spec))


@pytest.mark.parametrize(
    ("cfg", "total", "active"),
    [(gpt_oss_20b(), 20_914_757_184, 3.6e9), (gpt_oss_120b(), 116_829_156_672, 5.1e9)],
)
def test_the_released_models_have_their_published_counts(cfg, total, active):
    actual = count_params(cfg)
    assert actual[0] == total and abs(actual[1] - active) < 0.05e9


def test_every_layer_is_stacked_with_its_axes():
    tree = param_specs(CFG)
    assert tree["layers"]["sliding"] == tree["layers"]["full"]
    for spec in tree["layers"]["full"].values():
        assert spec.shape[0] == 3 and spec.is_stacked and "{}" in spec.hf
    assert all(len(s.shape) == len(s.axes) for s in list_specs(CFG))
    hf_names = [s.hf for s in list_specs(CFG)]
    assert len(set(hf_names)) == len(tree["layers"]["full"]) + 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("w_q", (3, 48, 240)),
        ("w_k", (3, 48, 48)),
        ("w_o", (3, 240, 48)),
        ("sinks", (3, 15)),
        ("w_router", (3, 48, 7)),
        ("w_gate_up", (3, 7, 48, 80)),
        ("b_gate_up", (3, 7, 80)),
        ("w_down", (3, 7, 40, 48)),
        ("b_down", (3, 7, 48)),
    ],
)
def test_shapes_by_hand(name, shape):
    assert param_specs(CFG)["layers"]["sliding"][name].shape == shape


def test_the_vocabulary_is_padded_but_not_counted():
    tree = param_specs(CFG)
    assert tree["embed"].shape == (128, 48) and tree["head"].shape == (48, 128)
    plain = ModelConfig(**{**vars(CFG), "vocab_multiple": 1})
    assert count_params(CFG) == count_params(plain)
    n_params = sum(x.size for x in jax.tree.leaves(abstract_params(plain)))
    assert count_params(plain)[0] == n_params


def test_initial_values_match_the_table():
    params = init_params(jax.random.key(0), CFG, "bfloat16")

    def check_init(spec, x):
        assert x.shape == spec.shape and x.dtype == jnp.bfloat16
        values = np.asarray(x, np.float64)
        if spec.init != "normal":
            assert np.all(values == (spec.init == "ones"))
            return
        fan_in = spec.shape[-1 if spec.axes[-1] == "width" else -2]
        # mean of squares of n normals: deviation sqrt(2/n); five of them, and bfloat16's rounding
        ratio = np.mean(values**2) * fan_in
        assert abs(ratio - 1) < 5 * np.sqrt(2 / values.size) + 2**-8, spec.hf

    map_specs(check_init, CFG, params)


def test_a_seed_repeats_weights_and_leaves_differ():
    first, two = (init_params(jax.random.key(3), CFG) for _ in range(2))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, two
    )
    sliding, full = first["layers"]["sliding"]["w_q"], first["layers"]["full"]["w_q"]
    assert not np.array_equal(np.asarray(sliding), np.asarray(full))


@pytest.mark.slow
def test_parameters_as_read_give_a_bitwise_equal_forward():
    """The column `read` is what the forward does: tried parameter by parameter."""
    cfg = tiny(d_model=32, d_expert=24, n_experts=4, vocab_size=29, dtype="bfloat16")
    dice = np.random.default_rng(0)
    params = map_specs(  # large enough that each matters, and none a bfloat16 number
        lambda s: jnp.asarray(
            (8 if "sinks" in s.hf else 0.5) + dice.normal(size=s.shape), jnp.float32
        ),
        cfg,
    )
    tokens = jnp.asarray(dice.integers(0, 29, (2, 13)), jnp.int32)

    @jax.jit
    def run(params):
        hidden, _, recorded = forward(params, tokens, cfg, plain_ops())
        logp, _ = sequence_logprobs(params, hidden, tokens, cfg, plain_ops())
        return hidden, logp, recorded["experts_BTA"]

    def is_equal(a, b):
        return all(np.array_equal(x, y) for x, y in zip(run(a), run(b), strict=True))

    assert is_equal(params, cast_for_forward(params, cfg))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    table = list_specs(cfg)
    leaves, tree = jax.tree.flatten(params)
    reads = {}
    for i, (spec, leaf) in enumerate(zip(table, jax.tree.leaves(rounded), strict=True)):
        first = jax.tree.unflatten(tree, [*leaves[:i], leaf, *leaves[i + 1 :]])
        reads.setdefault((spec.hf, spec.read), []).append(is_equal(params, first))
    for (name, read), unchanged in reads.items():
        assert all(unchanged) if read == "compute" else not all(unchanged), name
