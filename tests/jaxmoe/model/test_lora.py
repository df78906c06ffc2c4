# SPDX-License-Identifier: Apache-2.0
"""Adapters over packed weights: nothing at first, then the merged weights' values and gradients."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import CFG, LORA, OPS, adapters_of, base_of, dense

from jaxmoe.config import ConfigError, LoraConfig
from jaxmoe.config.lora import MODULES_TO_SAVE
from jaxmoe.model import forward, sequence_logprobs
from jaxmoe.model.lora import Pair, adapter_shapes, init_adapters, lora_specs, with_adapters
from jaxmoe.model.router import replay_routing
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from tests.jaxmoe.checkpoint.random_adapters import merge_adapters
from tests.pallas_kernels.three_way import three_way

TOKENS = jax.random.randint(jax.random.key(1), (3, 40), 0, CFG.vocab_size)


@partial(jax.jit, static_argnames="cfg")
def compute_logp(params, cfg=CFG):
    hidden, _, recorded = forward(params, TOKENS, cfg, OPS)
    return sequence_logprobs(params, hidden, TOKENS, cfg, OPS)[0][:, 1:], recorded["experts_BTA"]


def merge_all(base, adapters, lora=LORA):
    return jax.tree.map(jnp.asarray, merge_adapters(base, adapters, lora.scales, dtype="float32"))


def test_before_training_they_change_no_bit():
    base = base_of()
    fresh = with_adapters(base, init_adapters(jax.random.key(2), CFG, LORA), LORA.scales)
    plain = compute_logp(dense(base))
    for actual, expected in zip(compute_logp(fresh), plain, strict=True):
        np.testing.assert_array_equal(actual, expected)
    moved = compute_logp(with_adapters(base, adapters_of(), LORA.scales))[0]
    assert float(jnp.abs(moved - plain[0]).max()) > 0.5


def test_a_starts_at_inverse_root_of_the_inputs():
    """So a change's size does not depend on the width of what it multiplies."""
    for rank in (2, 16):
        lora = replace(LORA, attention_rank=rank, expert_rank=rank)
        adapters = init_adapters(jax.random.key(4), CFG, lora)
        for layer in adapters["layers"].values():
            for name, pair in layer.items():
                inputs, count = pair.a.shape[-1], pair.a.size
                assert pair.a.shape[-2] == rank != inputs
                # the deviation of so many normal numbers is known to within 5 of its own
                assert abs(float(pair.a.std()) * inputs**0.5 - 1) < 5 / (2 * count) ** 0.5, name
                assert not np.any(pair.b)


def test_log_probs_match_only_the_merged_weights():
    base, adapters = base_of(), adapters_of()
    expected = compute_logp(merge_all(base, adapters))[0]

    def gap_to_expected(tree, scales=LORA.scales):
        return float(jnp.abs(compute_logp(with_adapters(base, tree, scales))[0] - expected).max())

    assert gap_to_expected(adapters) < 1e-4

    def swap_halves(layer):  # the halves of B that belong to gate and to up
        a, b = layer["w_gate_up"]
        return layer | {"w_gate_up": Pair(a, jnp.concatenate(jnp.split(b, 2, -1)[::-1], -1))}

    layers = adapters["layers"]
    wrong_logps = [
        {"layers": {kind: swap_halves(layer) for kind, layer in layers.items()}},
        {"layers": {"sliding": layers["full"], "full": layers["sliding"]}},
        {
            "layers": {
                kind: layer | {"w_q": Pair(layer["w_o"].b[..., :128], layer["w_q"].b)}
                for kind, layer in layers.items()
            }
        },
    ]
    assert min(map(gap_to_expected, wrong_logps)) > 1e-2
    assert gap_to_expected(adapters, {name: 1.0 for name in LORA.scales}) > 1e-2


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", marks=(pytest.mark.slow, pytest.mark.extended)),
    ],
)
def test_gradients_are_those_of_the_merged_weights(dtype):
    """Rounding switches experts in bfloat16, so those of float32 are replayed there."""
    base, adapters = base_of(), adapters_of()
    cfg = replace(CFG, dtype=dtype)
    indices = compute_logp(with_adapters(base, adapters, LORA.scales))[1]
    routed = jnp.moveaxis(indices, 0, 2)

    def score_tree(read, cfg):
        def sum_logp(tree):
            params = read(tree)
            hidden, _, _ = forward(
                params, TOKENS, cfg, replace(OPS, router=replay_routing), routed_experts_BTLA=routed
            )
            return jnp.mean(sequence_logprobs(params, hidden, TOKENS, cfg, OPS)[0][:, 1:])

        return jax.jit(jax.grad(sum_logp))(adapters)

    def merge_tree(tree):  # of arrays that are traced
        def merge_pair(w, pair, scale):
            w = mxfp4_to_dense(w) if isinstance(w, Mxfp4) else w
            return w + scale * jnp.einsum("...ri,...ro->...io", *pair, precision="highest")

        layers = {
            kind: layer
            | {n: merge_pair(layer[n], p, LORA.scales[n]) for n, p in tree["layers"][kind].items()}
            for kind, layer in base["layers"].items()
        }
        return base | {"layers": layers}

    actual = score_tree(lambda tree: with_adapters(base, tree, LORA.scales), cfg)
    plain = score_tree(merge_tree, cfg)
    expected = plain if cfg == CFG else score_tree(merge_tree, CFG)
    for (path, x), y, z in zip(
        jax.tree.leaves_with_path(actual),
        jax.tree.leaves(plain),
        jax.tree.leaves(expected),
        strict=True,
    ):
        assert x.dtype == jnp.float32 and float(jnp.abs(x).max()) > 0
        if dtype == "float32":
            np.testing.assert_allclose(x, z, rtol=2e-3, atol=2e-5 * float(jnp.abs(z).max()) + 1e-8)
        else:
            three_way(x, y, z, jax.tree_util.keystr(path), ulps=2**17)  # bfloat16's ulp, in float32


@pytest.mark.slow  # a backward pass of all weights
def test_completely_trained_modules_start_as_the_base():
    lora = replace(LORA, targets="w_k,w_down", modules_to_save=",".join(MODULES_TO_SAVE))
    base = base_of()
    adapters = init_adapters(jax.random.key(2), CFG, lora, base)
    names = {name for group in MODULES_TO_SAVE.values() for name in group}
    layer = adapters["layers"]["sliding"]
    assert layer.keys() | adapters.keys() == names | {"w_k", "w_down", "layers"}
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), adapters)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), adapter_shapes(CFG, lora))
    shared = set(map(id, jax.tree.leaves(base)))
    assert not shared & set(map(id, jax.tree.leaves(adapters)))  # an update donates them
    np.testing.assert_array_equal(
        compute_logp(with_adapters(base, adapters, lora.scales))[0], compute_logp(base)[0]
    )

    @partial(jax.jit, static_argnums=1)
    def compute_gradient(tree, read):
        def sum_logp(tree):
            params = read(tree)
            hidden, _, _ = forward(params, TOKENS, CFG, OPS)
            return jnp.mean(sequence_logprobs(params, hidden, TOKENS, CFG, OPS)[0][:, 1:])

        return jax.grad(sum_logp)(tree)

    actual = compute_gradient(adapters, lambda tree: with_adapters(base, tree, lora.scales))
    plain = compute_gradient(dense(base), lambda params: params)
    for kind, layer in actual["layers"].items():
        for name in layer.keys() & names:
            assert float(jnp.abs(layer[name]).max()) > 0 or name == "b_k", name  # no score sees b_k
            assert_close(layer[name], plain["layers"][kind][name])
    for name in actual.keys() - {"layers"}:
        assert_close(actual[name], plain[name])


def assert_close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * float(jnp.abs(y).max()) + 1e-9)


def test_only_ranked_matrices_are_adapted_within_their_size():
    attention = lora_specs(CFG, LoraConfig(attention_rank=2))["layers"]["full"]
    assert sorted(attention) == ["w_k", "w_o", "w_q", "w_v"]
    assert attention["w_k"].a.shape == (1, 2, 128) and attention["w_k"].b.shape == (1, 2, 48)
    experts = lora_specs(CFG, LoraConfig(expert_rank=2))["layers"]["sliding"]
    assert experts["w_gate_up"].b.shape == (1, 7, 2, 128)
    with pytest.raises(ConfigError, match="lora.expert_rank must be at most 64, .*got 65"):
        lora_specs(CFG, LoraConfig(expert_rank=65))
    with pytest.raises(ConfigError, match="lora.attention_rank must be 1 or more"):
        LoraConfig(attention_rank=-1)
    assert LoraConfig(attention_rank=4, rank_stabilized=True).scales["w_q"] == 8.0
