# SPDX-License-Identifier: Apache-2.0
"""Models of other layers than GPT-OSS's: their order, their parameters, and what reads them."""

import json
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import iter_hf, load_params, save_params
from jaxmoe.config import ConfigError, LoraConfig, MeshConfig
from jaxmoe.config.layer_plan import BlockKind, LayerPlan
from jaxmoe.config_file import load_config, override
from jaxmoe.model import forward, init_cache, plain_ops, sequence_logprobs, tiny
from jaxmoe.model.cache import cache_bytes
from jaxmoe.model.config import JAXMOE_TYPE, from_hf, to_hf
from jaxmoe.model.lora import init_adapters
from jaxmoe.model.params import abstract_params, block_specs
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh, param_shardings
from jaxmoe.reconcile.op_comparison import forward_by_op
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.run.memory import layer_flops, plan_memory
from jaxmoe.shapes import Params
from tests.jaxmoe.model.compositions import Readings, count_differing, exact_ops, make_rows
from tests.jaxmoe.random_weights import random_weights
from tests.jaxmoe.reconcile.peer import Peer, log_softmax, peer_logits

SIZES = dict(
    vocab_size=61,
    d_model=40,
    n_q_heads=6,
    n_kv_heads=2,
    head_dim=8,
    n_experts=4,
    experts_per_token=3,
    d_expert=24,
    sliding_window=9,
)
# Periods of three and of two, and a remainder of two layers and of one.
THREE = tiny(**SIZES, n_layers=5, layer_types="sliding+sliding(window=5)+full")
BARE = tiny(**SIZES, n_layers=3, layer_types="full(sinks=False, biases=False)+sliding(sinks=False)")
MODELS = pytest.mark.parametrize("cfg", [THREE, BARE], ids=["three", "bare"])
OPS = plain_ops()
TOKENS_BT = np.random.default_rng(0).integers(0, 61, (2, 23)).astype(np.int32)


@lru_cache
def weights_of(cfg):
    return random_weights(cfg, 3)


def sum_logp(params, cfg, ops=OPS):
    hidden_BTD, _, _ = forward(params, jnp.asarray(TOKENS_BT), cfg, ops)
    logp_BT, _ = sequence_logprobs(params, hidden_BTD, jnp.asarray(TOKENS_BT), cfg, ops)
    return jnp.sum(logp_BT[:, 1:]), logp_BT


@lru_cache
def scores_of(cfg):
    """((sum, log-probs), gradients) of the scans."""
    return jax.jit(jax.value_and_grad(sum_logp, has_aux=True), static_argnums=1)(
        weights_of(cfg), cfg
    )


def assert_near(actual, expected, roundings=512):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        scale = roundings * 2.0**-24 * max(np.abs(y).max(), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=scale, err_msg=str(path))


@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 7, 36])
@pytest.mark.parametrize("n_kinds", [1, 2, 3, 8])
def test_each_layer_has_one_place(n_kinds, n_layers):
    kinds = [BlockKind("full" if i % 3 == 2 else "sliding", i + 1) for i in range(n_kinds)]
    plan = LayerPlan(tuple(kinds[i % n_kinds] for i in range(n_layers)))
    places = [plan.find_layer(layer) for layer in range(n_layers)]
    assert len(set(places)) == n_layers == sum(group.size for group in plan.groups.values())
    for layer, (name, index) in enumerate(places):
        assert plan.groups[name].layer_number(index) == layer
        assert plan.groups[name].kind == plan.kinds[layer]
    assert len(plan.blocks) == 1 + (n_layers > n_kinds and n_layers % n_kinds > 0)


def test_groups_of_gpt_oss_are_sliding_and_full():
    sizes = {name: group.size for name, group in tiny(n_layers=6).plan.groups.items()}
    assert sizes == {"sliding": 3, "full": 3}
    assert list(tiny(n_layers=5).plan.groups) == ["sliding", "full", "tail_sliding"]
    assert [g.size for g in THREE.plan.groups.values()] == [1] * 5
    assert tiny(layer_types="sliding+full+sliding+full").plan == tiny().plan


@pytest.mark.parametrize(
    "text", ["", "sliding,full", "full(window=3)", "sliding(window=0)", "full(sinks=1)", "moe"]
)
def test_what_is_no_kind_says_what_to_type(text):
    with pytest.raises(ConfigError, match=r'Try --set "model.layer_types=sliding\(window=64\)'):
        tiny(layer_types=text)


@MODELS
def test_log_probs_are_those_of_numpy(cfg):
    (_, logp_BT), _ = scores_of(cfg)
    for row, logp_T in zip(TOKENS_BT, np.asarray(logp_BT), strict=True):
        want = log_softmax(peer_logits(weights_of(cfg), row, cfg, Peer()).astype(np.float64))
        want = np.take_along_axis(want[:-1], row[1:, None], 1)[:, 0]
        np.testing.assert_allclose(
            logp_T[1:], want, rtol=0, atol=512 * 2.0**-24 * np.abs(want).max()
        )


@pytest.mark.parametrize(
    "cfg", [BARE, pytest.param(THREE, marks=pytest.mark.slow)], ids=["bare", "three"]
)
def test_gradients_are_those_of_unrolled_layers(cfg):
    def unrolled(params: Params):
        call = forward_by_op(
            params, jnp.asarray(TOKENS_BT), cfg, OPS, lambda _place, fn, *inputs: fn(*inputs)
        )
        return jnp.sum(call[:, 1:])

    grads = scores_of(cfg)[1]
    assert_near(grads, jax.jit(jax.grad(unrolled))(weights_of(cfg)))
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_kinds_have_only_their_own_parameters():
    params = abstract_params(BARE)
    names = {name: set(layer) for name, layer in params["layers"].items()}
    assert not any(n == "sinks" or n.startswith("b_") for n in names["full"] | names["tail_full"])
    assert names["sliding"] == set(block_specs(BARE)) - {"sinks"}
    moments = jax.eval_shape(make_optimizer(load_config("tiny.py").optim, steps=3).init, params)
    for tree in (scores_of(BARE)[1], moments):
        paths = [
            jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]
        assert not any("sinks" in path for path in paths)
        assert not any("full" in path and "'b_" in path for path in paths)
    lora = LoraConfig(attention_rank=2, modules_to_save="biases")
    adapters = init_adapters(jax.random.key(0), BARE, lora, weights_of(BARE))
    assert set(adapters["layers"]["full"]) == {"w_q", "w_k", "w_v", "w_o"}


@pytest.mark.parametrize(
    "cfg", [BARE, pytest.param(THREE, marks=pytest.mark.slow)], ids=["bare", "three"]
)
def test_decoding_from_a_cache_is_the_forward(cfg):
    params, tokens = weights_of(cfg), jnp.asarray(TOKENS_BT)
    run = jax.jit(
        lambda p, t, positions, c: forward(p, t, cfg, OPS, positions_BT=positions, cache=c)[:2]
    )
    want, _, _ = jax.jit(forward, static_argnums=(2, 3))(params, tokens, cfg, OPS)
    cache, hidden = init_cache(cfg, 2, 23), []
    assert cache_bytes(cfg, 2, 23) == sum(x.nbytes for x in jax.tree.leaves(cache))
    for columns in (slice(0, 11), *(slice(t, t + 1) for t in range(11, 23))):
        positions = jnp.broadcast_to(jnp.arange(23)[columns], tokens[:, columns].shape)
        part, cache = run(params, tokens[:, columns], positions, cache)
        hidden.append(part)
    assert_near(jnp.concatenate(hidden, axis=1), want)


@pytest.mark.parametrize(
    "cfg", [BARE, pytest.param(THREE, marks=pytest.mark.slow)], ids=["bare", "three"]
)
def test_invariant_decoding_has_the_forwards_bits(cfg):
    read = Readings(cfg, exact_ops())
    rows = make_rows((19, 23), cfg.vocab_size)
    base = read.read_full(rows, 23)
    assert count_differing(base, read.read_sampled(rows, 7, 8, 24)) == 0
    assert count_differing(base, read.read_full(rows, 27, pad_left=True)) == 0


@pytest.mark.slow  # of the model as it is, test_mesh_step.py is in the default suite
@pytest.mark.parametrize(
    "cfg, axis",
    [(THREE, "fsdp"), (BARE, "tensor")],
    ids=["three", "bare"],
)
def test_a_mesh_has_the_gradients_of_one_device(cfg, axis):
    mesh = make_mesh(MeshConfig(**{axis: 2}), jax.devices()[:2])
    params = jax.device_put(weights_of(cfg), param_shardings(cfg, mesh))
    graded = jax.jit(jax.value_and_grad(sum_logp, has_aux=True), static_argnums=(1, 2))
    (_, logp_BT), grads = graded(params, cfg, sharded_ops(OPS, mesh, cfg))
    (_, want_BT), expected = scores_of(cfg)
    assert_near(logp_BT[:, 1:], want_BT[:, 1:])
    assert_near(grads, expected)


@MODELS
def test_an_export_read_again_is_the_model(cfg, tmp_path):
    params = weights_of(cfg)
    save_params(params, cfg, tmp_path / "out", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == JAXMOE_TYPE and from_hf(config).plan == cfg.plan
    jax.tree.map(
        np.testing.assert_array_equal, load_params(tmp_path / "out", cfg, "float32"), params
    )
    counts = Counter(name.split(".")[2] for name, _ in iter_hf(params, cfg) if "layers" in name)
    has = [len(block_specs(cfg, kind)) for kind in cfg.plan.kinds]
    assert counts == {str(layer): n for layer, n in enumerate(has)}


def test_layer_types_of_config_json_are_read():
    names = [f"{x}_attention" for x in ("sliding", "sliding", "full", "sliding", "sliding")]
    config = to_hf(tiny(n_layers=5), dtype="float32") | {"layer_types": names}
    assert from_hf(config).layer_types == "sliding+sliding+full"
    assert to_hf(from_hf(config), dtype="float32") == config
    with pytest.raises(ConfigError, match="layer_types must be 5 of sliding_attention and full"):
        from_hf(config | {"layer_types": names[:4]})


def test_the_memory_plan_counts_each_layer():
    cfg = override(load_config("tiny.py"), "model.n_layers=7")
    bare = override(cfg, "model.layer_types=sliding+sliding+full(sinks=False, biases=False)")
    for c in (cfg, bare):
        leaves = jax.tree.leaves(abstract_params(c.model))
        assert plan_memory(c).weights == sum(4 * x.size for x in leaves)
    visible, T = 0, bare.context
    for layer in range(7):
        window = T if layer % 3 == 2 else bare.model.sliding_window
        visible += sum(min(t + 1, window) for t in range(T))
    heads = 4 * bare.model.n_q_heads * bare.model.head_dim
    assert layer_flops(bare).attention == heads * visible


def test_vllm_refuses_other_layers_in_one_line():
    cfg = load_config("tiny.py")
    vllm = replace(cfg.rollout, engine="vllm")
    replace(cfg, rollout=vllm, model=tiny(n_layers=3))
    for model in (
        tiny(layer_types="full"),
        replace(tiny(), layer_types="sliding+full(sinks=False)"),
    ):
        with pytest.raises(ConfigError, match="Try --set rollout.engine=native"):
            replace(cfg, rollout=vllm, model=model)
