# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself: its config field by field, and what it vouches for."""

from dataclasses import replace

import pytest

from jaxmoe.model.config import to_hf
from jaxmoe.reconcile.handshake import (
    Handshake,
    config_finding,
    find_config_differences,
    read_handshake,
)
from jaxmoe.reconcile.hypotheses import list_hypotheses
from tests.jaxmoe.reconcile.faults import CFG, COOL, Fault, make_report, make_weights, name_faults
from tests.jaxmoe.reconcile.peer import Peer

HF_CONFIG = to_hf(CFG, dtype="float32")
WORKER = {
    "model": HF_CONFIG,
    "logprobs_mode": "processed_logprobs",
    "label": "v3",
    "stale": [],
    "unreadable": [],
}


def test_its_own_config_is_not_unlike():
    assert find_config_differences(HF_CONFIG, CFG) == {}
    assert find_config_differences({}, CFG) == {}  # of an older plugin, which tells nothing
    parameters = {"rope_type": "default", "rope_theta": CFG.rope_theta}
    plain = replace(CFG, rope_factor=1.0)
    assert (
        find_config_differences({"rope_parameters": parameters, "rope_scaling": None}, plain) == {}
    )


@pytest.mark.parametrize(
    "field, key, value",
    [
        ("vocab_size", "vocab_size", 128),
        ("d_model", "hidden_size", 64),
        ("experts_per_token", "num_experts_per_tok", 2),
        ("sliding_window", "sliding_window", 8),
        ("swiglu_limit", "swiglu_limit", 7.0),
        ("rms_eps", "rms_norm_eps", 1e-6),
        ("rope_theta", "rope_theta", 1e4),
    ],
)
def test_each_field_that_differs_is_found(field, key, value):
    assert find_config_differences(HF_CONFIG | {key: value}, CFG) == {field: value}
    finding = config_finding({field: value}, CFG)
    assert (
        f"{key} {getattr(CFG, field)}" in finding.requirement and f"{key} {value}" in finding.actual
    )


def test_a_field_of_rope_that_differs_is_found():
    rope = HF_CONFIG["rope_scaling"] | {"factor": 16.0, "truncate": True}
    value = find_config_differences(HF_CONFIG | {"rope_scaling": rope}, CFG)
    assert value == {"rope_factor": 16.0, "rope_truncate": True}


def test_what_it_vouches_for_is_out():
    def list_tried(worker):
        options = dict(
            previous=make_weights(1),
            has_log_kept=True,
            handshake=read_handshake([WORKER | worker], CFG),
        )
        return {
            h.name
            for stage in list_hypotheses(CFG, replace(COOL, top_k=9), **options)
            for h in stage
        }

    dtypes = {name for name in list_tried({"model": {}}) if name.startswith("all_")}
    assert dtypes and not dtypes & list_tried({})
    for name, worker in {
        "stale_head": {"unreadable": ["lm_head.weight"]},
        "stale_everything": {"label": None},  # its live tensors are others by now
        "raw_logprobs": {"logprobs_mode": "raw_logprobs"},
        "kept_mass_twice": {"logprobs_mode": None},
    }.items():
        assert name in list_tried(worker) and name not in list_tried({})
    assert read_handshake([], CFG) == Handshake()
    assert (
        read_handshake([WORKER, WORKER | {"model": HF_CONFIG | {"dtype": "bfloat16"}}], CFG).dtype
        is None
    )


@pytest.mark.slow  # two reports
def test_an_engine_of_another_config_is_named():
    peer, differences = Peer(active=3, eps=1e-3), dict(experts_per_token=3, rms_eps=1e-3)
    r = make_report(Fault(peer), handshake=Handshake("float32", config_differences=differences))
    assert name_faults(r) == ("engine_config",)
    assert "num_experts_per_tok 4" in r.verdict.faults[0].requirement
    report_wrong = make_report(
        Fault(Peer(sinks=False)),
        handshake=Handshake("float32", config_differences=dict(rms_eps=1e-3)),
    )
    assert name_faults(report_wrong) != ("engine_config",)
