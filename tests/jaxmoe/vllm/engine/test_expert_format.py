# SPDX-License-Identifier: Apache-2.0
"""Experts in four bits reach a server as it holds them, and no server that would change them."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_weights
from stand_in import StandIn
from vllm_cases import CFG, NEW, OPS, PADDED, open_engine, prompts

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.model.rounded import decode_experts, round_experts
from jaxmoe.records import Sampling
from jaxmoe.vllm.engine.expert_format import FullWeights, pack_for_sync, starts_packed

PACKABLE = replace(CFG, d_expert=64)


@cache
def make_params():
    return jax.jit(round_experts)(random_weights(PACKABLE, 1))


def open_servers(tmp_path, *servers, four_bits=True):
    urls = ",".join(server.url for server in servers)
    return open_engine(
        urls, tmp_path, cfg=PACKABLE, retries=0, given=dict(sent=FullWeights(four_bits))
    )


@pytest.mark.parametrize("holds", ["mxfp4", "dense"])
def test_servers_get_their_form_and_the_trainers_values(tmp_path, holds):
    server = StandIn(PACKABLE, experts=holds)
    engine = open_servers(tmp_path, server)
    engine.load(make_params(), 3)
    (state,) = engine.loaded_states()
    packed = {name for name in state["received"] if name.endswith(("_blocks", "_scales"))}
    assert len(packed) == (4 * PACKABLE.n_layers if holds == "mxfp4" else 0)
    for r in engine.generate(prompts(2), Sampling(NEW, ()), seed=1, samples=1):
        ids = [*r.prompt.tokens, *r.tokens.tolist()]
        tokens = np.zeros((1, PADDED), np.int32)
        tokens[0, : len(ids)] = ids
        logp = np.asarray(TRAINER_LOGPS(make_params(), jnp.asarray(tokens), cfg=PACKABLE, ops=OPS))[
            0
        ]
        expected = logp[len(r.prompt.tokens) : len(ids)]
        np.testing.assert_allclose(r.rollout_logp, expected, atol=5e-5)
    engine.close()
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.parametrize(
    ("reported", "four_bits", "text"),
    [
        ([{"model": {"dtype": "float16"}}], True, "computes in float16. Start it with --dtype"),
        ([{"experts": "mxfp4"}], False, "this run trains dense ones. Start it from an export"),
        ([{"experts": "mxfp4"}, {}], True, "must hold experts in the same form, got http"),
    ],
)
def test_a_server_without_the_trained_form_is_refused(tmp_path, reported, four_bits, text):
    servers = [StandIn(PACKABLE, **fields) for fields in reported]
    with pytest.raises(ConfigError) as error:
        open_servers(tmp_path, *servers, four_bits=four_bits)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_vllm_starts_with_four_bits_where_kernels_exist():
    assert starts_packed(True, "bfloat16", cpu=False)
    assert not starts_packed(True, "bfloat16", cpu=True)
    assert not starts_packed(True, "float32", cpu=False)
    assert not starts_packed(False, "bfloat16", cpu=False)


@pytest.mark.parametrize(
    "value, text",
    [
        (np.nan, "layers/full/w_down must have finite values, and has NaN or infinity"),
        (np.inf, "layers/full/w_down must have finite values, and has NaN or infinity"),
        (0.3, "layers/full/w_down has values that MXFP4 does not hold"),
    ],
)
def test_weights_beyond_four_bits_are_refused_with_cause(value, text):
    params = decode_experts(make_params(), "float32")
    packed = pack_for_sync(params)
    decoded = decode_experts(packed, "float32")["layers"]["full"]["w_down"]
    np.testing.assert_array_equal(decoded, params["layers"]["full"]["w_down"])
    layer = params["layers"]["full"]
    layer["w_down"] = layer["w_down"].at[0, 1, 2, 3].set(value)
    with pytest.raises(EngineError, match=text):
        pack_for_sync(params)
