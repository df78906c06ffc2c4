# SPDX-License-Identifier: Apache-2.0
"""Staleness by tensor, from digests alone."""

import dataclasses
import json

import pytest

from jaxmoe.checkpoint.hf import list_entries
from jaxmoe.checkpoint.peft.write import CONFIG, FILE, save_adapter
from jaxmoe.checkpoint.tensor_files import read_header
from jaxmoe.config import LoraConfig
from jaxmoe.model.config import tiny, to_hf
from jaxmoe.vllm.engine.served_adapter import zero_adapters
from jaxmoe.vllm.plugin.loaded_state import ExpectedParameter, LoadedState
from jaxmoe.vllm.plugin.names import (
    SIZES,
    adapter_buffer_names,
    checkpoint_shapes,
    vllm_parameter_name,
)

PREFIX = "model.layers.3."
SINKS, QUERY = PREFIX + "self_attn.sinks", PREFIX + "self_attn.q_proj.weight"
LIVE_SINKS, LIVE_QUERY = PREFIX + "attn.sinks", PREFIX + "attn.qkv_proj.weight[q]"


def record(state, sent, after, *, exact=False, label="r:1"):
    """`sent` by checkpoint name, `after` by parameter; what lived before is what state says."""
    expected = {name: ExpectedParameter(digest, exact) for name, digest in sent.items()}
    state.invalidate()
    state.record_update(label, sent, expected, state.live, after, [])
    return state.stale


def test_every_tensor_has_a_shape_and_a_parameter():
    cfg = tiny(d_model=160, n_layers=4, n_q_heads=6, n_kv_heads=2, head_dim=32, n_experts=7)
    config = to_hf(cfg, dtype="float32")
    assert checkpoint_shapes(config) == {entry.name: entry.shape for entry in list_entries(cfg)}
    expected = [vllm_parameter_name(entry.name) for entry in list_entries(cfg)]
    assert len(set(expected)) == len(expected)
    assert set(SIZES) <= set(config)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("model.embed_tokens.weight", "model.embedding.weight"),
        ("lm_head.weight", "lm_head.weight"),
        (PREFIX + "self_attn.k_proj.bias", PREFIX + "attn.qkv_proj.bias[k]"),
        (PREFIX + "self_attn.o_proj.weight", PREFIX + "attn.o_proj.weight"),
        (PREFIX + "mlp.experts.down_proj", PREFIX + "mlp.experts.routed_experts.w2_weight"),
        (PREFIX + "mlp.experts.gate_up_proj_bias", PREFIX + "mlp.experts.routed_experts.w13_bias"),
        (PREFIX + "mlp.router.bias", PREFIX + "mlp.router.bias"),
    ],
)
def test_a_tensor_feeds_the_parameter_of_vllms_name(name, parameter):
    assert vllm_parameter_name(name) == parameter


def test_a_changed_tensor_with_unchanged_parameter_is_stale():
    state = LoadedState()
    assert record(state, {SINKS: "1", QUERY: "2"}, {LIVE_SINKS: "a", LIVE_QUERY: "b"}) == []
    assert record(state, {SINKS: "3", QUERY: "4"}, {LIVE_SINKS: "a", LIVE_QUERY: "c"}) == [SINKS]


def test_staleness_lasts_until_the_tensor_arrives_or_reverts():
    state = LoadedState()
    record(state, {SINKS: "1"}, {LIVE_SINKS: "a"})
    assert record(state, {SINKS: "2"}, {LIVE_SINKS: "a"}) == [SINKS]
    assert record(state, {SINKS: "2"}, {LIVE_SINKS: "a"}) == [SINKS]
    assert record(state, {SINKS: "1"}, {LIVE_SINKS: "a"}) == []
    assert record(state, {SINKS: "2"}, {LIVE_SINKS: "b"}) == []
    assert record(state, {SINKS: "2"}, {LIVE_SINKS: "b"}) == []


def test_known_stored_forms_show_staleness_at_first_update():
    state = LoadedState()
    assert record(state, {SINKS: "1"}, {LIVE_SINKS: "0"}, exact=True) == [SINKS]
    assert record(state, {SINKS: "1"}, {LIVE_SINKS: "2"}, exact=True) == [SINKS]  # wrong, not old
    assert record(state, {SINKS: "1"}, {LIVE_SINKS: "1"}, exact=True) == []


def test_an_unreadable_parameter_is_not_called_stale():
    state = LoadedState()
    record(state, {SINKS: "1", QUERY: "1"}, {LIVE_QUERY: "1"})
    assert record(state, {SINKS: "2", QUERY: "2"}, {LIVE_QUERY: "2"}) == []
    assert state.build_report({LIVE_QUERY: "2"}, ["other"])["unreadable"] == [LIVE_SINKS, "other"]


def test_every_change_of_weights_clears_the_label():
    state = LoadedState()
    record(state, {SINKS: "1"}, {LIVE_SINKS: "1"}, label="r:5")
    assert state.build_report({LIVE_SINKS: "1"}, [])["label"] == "r:5"
    assert state.build_report({LIVE_SINKS: "2"}, [])["label"] is None
    state.invalidate()
    assert state.build_report({LIVE_SINKS: "1"}, [])["label"] is None


def test_two_engines_are_told_apart():
    assert LoadedState().instance != LoadedState().instance
    assert {f.name for f in dataclasses.fields(LoadedState)} >= {"received", "live", "stale"}


def file_of(tmp_path, lora):
    """Names of an adapter's tensors, and its config, as they are written."""
    cfg = tiny(d_model=64, n_layers=4, n_q_heads=6, n_kv_heads=2, head_dim=32, n_experts=3)
    save_adapter(zero_adapters(cfg, lora), cfg, lora, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    return list(read_header(tmp_path / "adapter" / FILE)), config


@pytest.mark.parametrize(
    ("targets", "matrices"),
    [
        ("w_q,w_k,w_v,w_o,w_gate_up,w_down", "q k v o gate_up down"),
        ("w_v,w_o", "v o"),
        ("w_gate_up", "gate_up"),
        ("w_down", "down"),
    ],
)
def test_every_adapter_tensor_has_a_separate_place(tmp_path, targets, matrices):
    attention, experts = ("w_o" in targets) * 2, ("w_gate_up" in targets or "w_down" in targets) * 3
    lora = LoraConfig(attention_rank=attention, expert_rank=experts, targets=targets)
    names, config = file_of(tmp_path, lora)
    buffers = adapter_buffer_names(names, config)
    assert set(buffers) == set(names) and len(set(buffers.values())) == len(names)
    assert set(buffers.values()) == {
        f"layers.{layer}.{matrix}.{x}"
        for layer in range(4)
        for matrix in matrices.split()
        for x in "AB"
    }
    inner = [buffers[name] for name in names if ".base_layer.lora_A" in name]
    assert inner == [f"layers.{layer}.gate_up.A" for layer in range(4)] * (
        "down" in matrices and "gate" in matrices
    )


def test_adapter_staleness_shows_from_the_second_update():
    state = LoadedState()

    def record_adapter(sent, live):
        placed = {name: ExpectedParameter(x, False, "layers.0.q.A") for name, x in sent.items()}
        state.record_update("r:1", sent, placed, state.live, {"layers.0.q.A": live}, [])
        return state.stale

    assert record_adapter({"a": "1"}, "x") == []  # the first tells nothing
    assert record_adapter({"a": "2"}, "y") == [] and record_adapter({"a": "2"}, "y") == []
    assert record_adapter({"a": "3"}, "y") == ["a"]
