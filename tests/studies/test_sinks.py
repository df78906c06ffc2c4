# SPDX-License-Identifier: Apache-2.0
"""The contenders of the study of sinks: what gets a gradient, and what the engine samples from."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import forward, init_params, make_ops
from studies import sinks
from studies.router_bed import bed_config
from studies.sinks import WAYS, attend_with_constant_sinks, attend_without_sinks, sink_ops

CFG = bed_config(1)
TOKENS_BT = np.random.default_rng(0).integers(0, CFG.model.vocab_size, (2, 9)).astype(np.int32)


def shifted_params():
    params = init_params(jax.random.key(0), CFG.model)

    def shift(path, x):
        return x + 1.0 if "sinks" in jax.tree_util.keystr(path) else x

    return jax.tree_util.tree_map_with_path(shift, params)


def loss_and_gradient(way):
    ops = sink_ops(make_ops(CFG), way)

    def loss(params):
        return jnp.sum(jnp.sin(forward(params, jnp.asarray(TOKENS_BT), CFG.model, ops)[0]))

    value, gradient = jax.value_and_grad(loss)(shifted_params())
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    sizes = {jax.tree_util.keystr(path): float(jnp.abs(x).max()) for path, x in leaves}
    return float(value), {name: size for name, size in sizes.items() if "sinks" in name}


def test_contenders_differ_in_their_sinks_alone():
    (value, sizes), stopped, absent = map(
        loss_and_gradient, (None, attend_with_constant_sinks, attend_without_sinks)
    )
    assert min(sizes.values()) > 1e-4
    assert stopped[0] == value and not any(stopped[1].values())
    assert abs(absent[0] - value) > 1e-2 and not any(absent[1].values())


@pytest.mark.parametrize("name", WAYS)
def test_every_contender_samples_with_sinks(name, monkeypatch):
    monkeypatch.setattr(sinks, "make_bed_step", lambda cfg, task, *ops: ops)
    monkeypatch.setattr(sinks, "open_bed_engine", lambda cfg, ops: ops)
    programs = sinks.make_sink_programs(sinks.SINK_BEDS["shifted_sinks"], 1, (name,))
    trained, engine = programs.step
    assert engine.attend is programs.clean_engine.attend is make_ops(CFG).attend
    assert (trained.attend is engine.attend) == (name == "all gradients")


def test_a_shifted_start_has_other_sinks_alone(monkeypatch):
    monkeypatch.setattr(sinks, "load_bed_weights", lambda seed, folder: shifted_params())
    learned, shifted = (
        sinks.load_sink_weights(sinks.SINK_BEDS[name], 0, Path(), False)
        for name in ("learned_sinks", "shifted_sinks")
    )
    differences = jax.tree.map(lambda a, b: float(jnp.abs(b - a).max()), learned, shifted)
    for path, difference in jax.tree_util.tree_leaves_with_path(differences):
        assert difference == (3.0 if "sinks" in jax.tree_util.keystr(path) else 0.0)
