# SPDX-License-Identifier: Apache-2.0
"""Experts that are not finite are named by layer, matrix and number."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmoe.config import MeshConfig
from jaxmoe.config_file import load_config
from jaxmoe.model import init_params
from jaxmoe.parallel.finite import find_not_finite
from jaxmoe.parallel.sharding import make_mesh, param_shardings

CFG = replace(load_config("tiny_mxfp4.py").model, n_layers=4, vocab_size=32, vocab_multiple=16)


def broken_params(value, dtype="float32"):
    params = jax.jit(lambda: init_params(jax.random.key(0), CFG, dtype))()
    layer = params["layers"]["full"]
    layer["w_down"] = layer["w_down"].at[1, 5, 3, 7].set(value)
    return params


@pytest.mark.parametrize("value, dtype", [(math.nan, "float32"), (-math.inf, "bfloat16")])
def test_a_broken_expert_is_named_with_its_layer(value, dtype):
    params = broken_params(value, dtype)
    assert find_not_finite(params, CFG) == "layer 3, w_down, expert 5 (1 such matrices)"
    sharded = jax.device_put(params, param_shardings(CFG, make_mesh(MeshConfig(fsdp=2, expert=4))))
    assert find_not_finite(sharded, CFG) == "layer 3, w_down, expert 5 (1 such matrices)"
    gate_up = params["layers"]["sliding"]["w_gate_up"]
    params["layers"]["sliding"]["w_gate_up"] = gate_up.at[1, 0].set(value)
    assert find_not_finite(params, CFG) == "layer 2, w_gate_up, expert 0 (2 such matrices)"


def test_only_broken_experts_are_named():
    params = broken_params(np.finfo(np.float32).max)
    params["embed"] = params["embed"].at[0, 0].set(math.nan)
    assert find_not_finite(params, CFG) == ""
    without = params | {"layers": {"full": {"w_down": None}, "sliding": {}}}
    assert find_not_finite(without, CFG) == ""
