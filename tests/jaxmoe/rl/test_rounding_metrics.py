# SPDX-License-Identifier: Apache-2.0
"""Metrics of rounded experts at real sizes; of small ones: tests/jaxmoe/test_train_quant.py."""

import jax
import jax.numpy as jnp

from jaxmoe.model import gpt_oss_20b
from jaxmoe.model.params import abstract_params
from jaxmoe.model.rounded import round_experts
from jaxmoe.rl.rounding_metrics import rounding_metrics


def test_more_values_than_an_int32_counts_are_counted():
    def measure(params):
        packed = round_experts(params)
        return rounding_metrics(packed, packed, params)

    params = abstract_params(gpt_oss_20b())
    assert params["layers"]["full"]["w_gate_up"].size > 2**31
    metrics = jax.eval_shape(measure, params)
    assert {(x.shape, x.dtype) for x in metrics.values()} == {((), jnp.dtype("float32"))}
