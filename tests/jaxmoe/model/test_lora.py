# SPDX-License-Identifier: Apache-2.0
"""Adapters over packed weights: nothing at first, then the merged weights' values and gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import CFG, LORA, OPS, adapters_of, base_of, dense

from jaxmoe.config import ConfigError, LoraConfig
from jaxmoe.model import forward, sequence_logprobs
from jaxmoe.model.lora import Pair, init_adapters, lora_specs, with_adapters
from jaxmoe.model.moe.router import replay_routing
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from tests.jaxmoe.checkpoint.random_adapters import merge_adapters

TOKENS = jax.random.randint(jax.random.key(1), (3, 40), 0, CFG.vocab_size)


@jax.jit
def compute_logp(params):
    hidden, _, recorded = forward(params, TOKENS, CFG, OPS)
    return sequence_logprobs(params, hidden, TOKENS, CFG, OPS)[0][:, 1:], recorded["experts_BTA"]


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


@pytest.mark.slow
def test_gradients_are_those_of_the_merged_weights():
    base, adapters = base_of(), adapters_of()
    indices = compute_logp(with_adapters(base, adapters, LORA.scales))[1]
    routed = jnp.moveaxis(indices, 0, 2)

    def score_tree(read):
        def sum_logp(tree):
            params = read(tree)
            hidden, _, _ = forward(
                params, TOKENS, CFG, replace(OPS, router=replay_routing), routed_experts_BTLA=routed
            )
            return jnp.mean(sequence_logprobs(params, hidden, TOKENS, CFG, OPS)[0][:, 1:])

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

    actual = score_tree(lambda tree: with_adapters(base, tree, LORA.scales))
    for x, z in zip(jax.tree.leaves(actual), jax.tree.leaves(score_tree(merge_tree)), strict=True):
        assert x.dtype == jnp.float32 and float(jnp.abs(x).max()) > 0
        np.testing.assert_allclose(x, z, rtol=2e-3, atol=2e-5 * float(jnp.abs(z).max()) + 1e-8)


def test_only_ranked_matrices_are_adapted_within_their_size():
    attention = lora_specs(CFG, LoraConfig(attention_rank=2))["layers"]["full"]
    assert sorted(attention) == ["w_k", "w_o", "w_q", "w_v"]
    assert attention["w_k"].a.shape == (1, 2, 128) and attention["w_k"].b.shape == (1, 2, 48)
    experts = lora_specs(CFG, LoraConfig(expert_rank=2))["layers"]["sliding"]
    assert experts["w_gate_up"].b.shape == (1, 7, 2, 128)
    with pytest.raises(ConfigError, match="lora.expert_rank must be at most 64, .*got 65"):
        lora_specs(CFG, LoraConfig(expert_rank=65))
    with pytest.raises(ConfigError, match="lora.attention_rank must be 0 or more"):
        LoraConfig(attention_rank=-1)
    assert LoraConfig(attention_rank=4, rank_stabilized=True).scales["w_q"] == 8.0
