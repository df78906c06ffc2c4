# SPDX-License-Identifier: Apache-2.0
"""Where two forwards part: the token, the layer and the tensor are named."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.model import plain_ops, tiny
from jaxmoe.model.moe.router import route_top_k
from jaxmoe.model.ops import invariant_ops
from jaxmoe.reconcile.first_difference import find_first_difference
from tests.jaxmoe.random_weights import random_weights

CFG = tiny(
    vocab_size=61,
    d_model=40,
    n_q_heads=6,
    n_kv_heads=2,
    head_dim=8,
    n_experts=5,
    experts_per_token=3,
    d_expert=24,
    sliding_window=9,
)
PARAMS = random_weights(CFG, 0)
TOKENS = np.random.default_rng(0).integers(0, 61, 19).astype(np.int32)
EXACT = invariant_ops(plain_ops())


@pytest.mark.slow
def test_invariant_pieces_differ_nowhere():
    assert find_first_difference(PARAMS, TOKENS, 7, CFG, EXACT) is None


@pytest.mark.slow
def test_another_router_is_named_by_token_and_layer():
    def changed_op(h_BTD, layer, *, active):
        indices, weights = route_top_k(h_BTD, layer, active=active)
        return indices, weights * 1.5

    difference = find_first_difference(
        PARAMS, TOKENS, 7, CFG, EXACT, engine_ops=replace(EXACT, router=changed_op)
    )
    assert difference == "token 0, layer 0: its experts' weights (router)"


@pytest.mark.parametrize("layer", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_attention_of_one_layer_is_named(layer):
    def changed_op(*args, window, **layout):
        o, lse = EXACT.decode(*args, window=window, **layout)
        return (o * 1.01 if (window is None) == bool(layer) else o), lse

    difference = find_first_difference(
        PARAMS, TOKENS, 7, CFG, EXACT, engine_ops=replace(EXACT, decode=changed_op)
    )
    assert difference is not None
    assert difference.startswith(f"token 0, layer {layer}: the input of its experts (attention")
