# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into dense and packed weights, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import iter_hf, load_params, save_params
from jaxmoe.checkpoint.mxfp4 import decode_packed
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.model.lora import with_adapters
from jaxmoe.model.params import abstract_params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from tests.jaxmoe.checkpoint.random_adapters import (
    CFG,
    NAMES,
    delta,
    merge_adapters,
    random_adapters,
)

PACKABLE = dataclasses.replace(CFG, d_model=64, d_expert=128)
RANKS = {name: 2 if name in NAMES[4:] else 3 for name in NAMES}
SCALES = {name: 0.5 + 0.25 * i for i, name in enumerate(NAMES)}


def weights(cfg, dtype="float32"):
    rng = np.random.default_rng(1)
    draw = lambda x: rng.standard_normal(x.shape, np.float32).astype(dtype)  # noqa: E731
    return jax.tree.map(draw, abstract_params(cfg))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("put", [lambda x: x, jnp.asarray], ids=["numpy", "jax"])
def test_merging_adds_deltas_to_adapted_matrices_only(dtype, put):
    base = jax.tree.map(put, weights(CFG, jnp.dtype(dtype)))
    adapters = random_adapters(CFG, RANKS)
    result = merge_adapters(base, jax.tree.map(put, adapters), SCALES)
    for kind, leaves in base["layers"].items():
        for name, w in leaves.items():
            if name not in NAMES:
                assert result["layers"][kind][name] is w
                continue
            wide = np.asarray(w, np.float64) + delta(adapters, kind, name, SCALES[name])
            actual = result["layers"][kind][name]
            assert actual.dtype == jnp.dtype(dtype) and isinstance(actual, np.ndarray)
            unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-24  # half an ulp, of the result
            allowed = unit * np.abs(wide) + 2.0**-22 * np.abs(wide).max()
            assert (np.abs(actual.astype(np.float64) - wide) <= allowed).all()
    assert result["head"] is base["head"]


def test_packed_experts_are_merged_and_repacked_with_loss(tmp_path):
    packed, _ = pack_experts(weights(PACKABLE, ml_dtypes.bfloat16), PACKABLE)
    is_packed = lambda x: isinstance(x, Mxfp4)  # noqa: E731
    dense = jax.tree.map(
        lambda x: decode_packed(x) if is_packed(x) else x, packed, is_leaf=is_packed
    )
    adapters = random_adapters(PACKABLE, RANKS, size=0.3)
    actual, want = (merge_adapters(base, adapters, SCALES) for base in (packed, dense))
    is_equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and (x == y).all(), actual, want)
    assert all(jax.tree.leaves(is_equal))
    save_params(actual, PACKABLE, tmp_path / "dense")
    loaded = load_params(tmp_path / "dense", PACKABLE, "bfloat16")
    assert (loaded["layers"]["full"]["w_down"] == actual["layers"]["full"]["w_down"]).all()
    _, errors = pack_experts(actual, PACKABLE)
    assert min(error.relative for error in errors.values()) > 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_merges_by_layer_and_rounds_once(tmp_path, dtype):
    packed, _ = pack_experts(weights(PACKABLE, ml_dtypes.bfloat16), PACKABLE)
    adapters = random_adapters(PACKABLE, RANKS)
    adapted = with_adapters(jax.tree.map(jnp.asarray, packed), adapters, SCALES)
    save_params(adapted, PACKABLE, tmp_path / "out", dtype=dtype)
    want = merge_adapters(packed, adapters, SCALES, dtype="float32")
    names = {name: array for name, array in iter_hf(want, PACKABLE, dtype)}
    assert {name: x.tobytes() for name, x in iter_hf(adapted, PACKABLE, dtype)} == {
        name: x.tobytes() for name, x in names.items()
    }
    loaded = load_params(tmp_path / "out", PACKABLE, dtype)["layers"]["full"]["w_gate_up"]
    assert (loaded == want["layers"]["full"]["w_gate_up"].astype(jnp.dtype(dtype))).all()
