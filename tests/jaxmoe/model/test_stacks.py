# SPDX-License-Identifier: Apache-2.0
"""Packed experts are read where they lie: no layer's are copied out of the stack."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from adapted import CFG, LORA, OPS, adapters_of, base_of

from jaxmoe.model import forward
from jaxmoe.model.lora import split_adapter, with_adapters
from jaxmoe.model.stacks import remove_packed, restore_packed

FOUR_LAYERS = replace(CFG, n_layers=4)
TOKENS = jax.random.randint(jax.random.key(1), (2, 21), 0, CFG.vocab_size)


@pytest.mark.slow
def test_no_program_copies_one_layers_packed_experts():
    base, adapters = base_of(FOUR_LAYERS), adapters_of(FOUR_LAYERS)

    def sum_hidden(adapters, base):
        params = with_adapters(base, adapters, LORA.scales)
        return forward(params, TOKENS, FOUR_LAYERS, OPS)[0].sum()

    text = jax.jit(jax.grad(sum_hidden)).lower(adapters, base).compile().as_text()
    packed_shape = base["layers"]["full"]["w_gate_up"].nibbles_EDF.shape
    pairs, n_experts, *matrix_shape = packed_shape
    assert pairs == 2
    shapes = set(re.findall(r"u8\[[\d,]+\]", text))
    expected = ({packed_shape}, {(pairs * n_experts, *matrix_shape)})
    assert any(f"u8[{','.join(map(str, *s))}]" in shapes for s in expected)
    layer = ",".join(map(str, (n_experts, *matrix_shape)))
    assert not [s for s in shapes if s in (f"u8[{layer}]", f"u8[1,{layer}]")]


def test_a_pair_has_slices_and_packed_parts():
    layers = with_adapters(base_of(FOUR_LAYERS), adapters_of(FOUR_LAYERS), LORA.scales)["layers"]
    remaining = remove_packed(layers)
    assert (
        remaining["full"]["w_down"].base == (None,) * 4
        and remaining["full"]["w_q"].base is not None
    )
    second = jax.tree.map(lambda x: x[1], remaining)
    restored = restore_packed(second, layers, jnp.int32(1))["full"]
    part, _ = split_adapter(restored["w_down"], jnp.float32)
    assert int(part.first) == CFG.n_experts
    packed_shape = layers["full"]["w_down"].base.nibbles_EDF
    assert (part.nibbles_EDF[int(part.first) :] == packed_shape[1]).all()
    assert (restored["w_q"].a == layers["full"]["w_q"].a[1]).all()
