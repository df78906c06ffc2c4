# SPDX-License-Identifier: Apache-2.0
"""Metrics of rounded experts, compared with loops over single values in numpy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.mxfp4 import decode_packed
from jaxmoe.model import gpt_oss_20b, tiny
from jaxmoe.model.params import abstract_params
from jaxmoe.model.rounded import MATRICES, round_experts
from jaxmoe.rl.metrics.rounding_metrics import (
    SAMPLED_COLUMNS,
    SAMPLED_EXPERTS,
    moved_share,
    rounding_metrics,
    sample_codes,
)
from pallas_kernels.grouped_matmul import Mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from tests.jaxmoe.random_weights import random_weights

CFG = replace(tiny(), dtype="float32", n_layers=4, n_experts=3)


def draw_weights(seed=0):
    return random_weights(CFG, seed)


def change(params, kind, name, index, value):
    layer = params["layers"][kind]
    matrix = np.array(layer[name])
    matrix[index] = value
    changed = layer | {name: jax.device_put(matrix)}
    return params | {"layers": params["layers"] | {kind: changed}}


def numpy_values(packed):
    """(codes and scales of each value, decoded values) of a stack of matrices."""
    nibbles, scales = (np.asarray(x) for x in packed.codes)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-2)
    each_scale = np.repeat(scales, 32, axis=-2)
    values = np.stack([np.asarray(decode_packed(Mxfp4(n, s))) for n, s in zip(nibbles, scales)])  # noqa: B905
    return codes, each_scale.astype(np.int64), values.astype(np.float64)


@pytest.mark.slow
def test_every_metric_is_numpys_in_each_layer():
    old = draw_weights()
    new = jax.tree.map(lambda x: x + 0.01 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), old)
    # One layer stays as it was: the second of the full ones, which is layer 3.
    for name in MATRICES:
        new = change(new, "full", name, 1, old["layers"]["full"][name][1])
    metrics = rounding_metrics(round_experts(old), round_experts(new), new, CFG.plan)
    moved, rescaled, error, norm, distance, saturated, count = (np.zeros(4) for _ in range(7))
    for i, kind in enumerate(("sliding", "full")):
        for name in MATRICES:
            before = numpy_values(round_experts(old)["layers"][kind][name])
            codes, scales, values = numpy_values(round_experts(new)["layers"][kind][name])
            master = np.asarray(new["layers"][kind][name], np.float64)
            for pair in range(2):
                layer, power = 2 * pair + i, 2.0 ** (scales[pair] - 127)
                is_changed = before[2][pair] != values[pair]
                gap = np.abs(values[pair] - master[pair])
                moved[layer] += is_changed.sum()
                rescaled[layer] += (before[1][pair] != scales[pair]).sum()
                error[layer] += (gap**2).sum()
                norm[layer] += (master[pair] ** 2).sum()
                distance[layer] += (gap / power).sum()
                saturated[layer] += (np.abs(master[pair]) > 6 * power).sum()
                count[layer] += master[pair].size
    assert moved[3] == 0 and rescaled.sum() > 0 and (moved[:3] > 0).all() and saturated.sum() > 0
    expected = {
        "quant/moved_frac": moved.sum() / count.sum(),
        "quant/rescaled_frac": rescaled.sum() / count.sum(),
        "quant/saturated_frac": saturated.sum() / count.sum(),
        "quant/relative_error": np.sqrt(error.sum() / norm.sum()),
        "quant/distance": distance.sum() / count.sum(),
        "layers/quant_relative_error": np.sqrt(error / norm),
        "layers/quant_moved_frac": moved / count,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)


def test_a_sample_of_codes_shows_movement():
    params, sample, share = draw_weights(), jax.jit(sample_codes), jax.jit(moved_share)
    start = jax.device_get(sample(params))
    assert float(share(start, params)) == 0.0
    total = sum(2 * x.size for name, x in start.items() if name.endswith("nibbles_EDF"))
    # A value that becomes 0 is one code; its group keeps its scale unless it was the largest.
    value = np.asarray(params["layers"]["full"]["w_down"])[1, 2, :32, 0]
    smallest = int(np.argsort(np.abs(value))[20])
    moved = change(params, "full", "w_down", (1, 2, smallest, 0), 0.0)
    assert float(share(start, moved)) == pytest.approx(1 / total)
    # A group whose scale changes has moved but for its zeros, whatever its codes.
    group = (0, 0, slice(0, 32), 0)
    larger = 2 * np.asarray(params["layers"]["sliding"]["w_gate_up"])[group]
    doubled = change(params, "sliding", "w_gate_up", group, larger)
    packed = jax.jit(round_experts)(params)["layers"]["sliding"]["w_gate_up"]
    n_zeros = int(np.sum(np.asarray(jax.jit(mxfp4_to_dense)(packed))[group] == 0))
    assert float(share(start, doubled)) == pytest.approx((32 - n_zeros) / total)
    # Another sign of zero is the same value.
    zeros = change(params, "full", "w_down", (1, 2, slice(0, 32), 0), 0.0)
    negative = change(params, "full", "w_down", (1, 2, slice(0, 32), 0), -0.0)
    assert float(share(jax.device_get(sample(zeros)), negative)) == 0.0


@pytest.mark.parametrize("n_experts, width", [(4, 8), (8, 16), (9, 17), (15, 31), (33, 100)])
def test_a_sample_has_at_most_its_stated_size(n_experts, width):
    w_LEDF = jax.ShapeDtypeStruct((1, n_experts, 64, width), jnp.float32)
    params = {"layers": {"full": {"w_gate_up": w_LEDF, "w_down": w_LEDF}}}
    start = jax.eval_shape(sample_codes, params)
    _, experts, _, columns = start["full/w_down/scales_EDF"].shape
    assert min(4, n_experts) <= experts <= SAMPLED_EXPERTS
    assert min(8, width) <= columns <= SAMPLED_COLUMNS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nonfinite_master_makes_the_error_nonfinite(dtype):
    """The guard of a run relies on it: jaxmoe/run/guards.py."""
    cfg = tiny(d_model=64, d_expert=64, n_layers=4, n_experts=5)
    params = jax.tree.map(lambda x: x.astype(dtype), random_weights(cfg, 0))
    before = jax.jit(round_experts)(params)
    measure = jax.jit(lambda after: rounding_metrics(before, round_experts(after), after, CFG.plan))
    assert np.isfinite(measure(params)["quant/relative_error"])
    for kind in ("sliding", "full"):
        for name in MATRICES:
            for value in (np.nan, np.inf, -np.inf):
                broken = change(params, kind, name, (1, 4, 63, 31), value)
                assert not np.isfinite(measure(broken)["quant/relative_error"])


def test_more_values_than_an_int32_counts_are_counted():
    def measure(params):
        packed = round_experts(params)
        return rounding_metrics(packed, packed, params, gpt_oss_20b().plan)

    params = abstract_params(gpt_oss_20b())
    assert params["layers"]["full"]["w_gate_up"].size > 2**31
    metrics = jax.eval_shape(measure, params)
    assert {x.dtype for x in metrics.values()} == {jnp.dtype("float32")}
