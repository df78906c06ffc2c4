# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself: its config field by field, and what it vouches for."""

from dataclasses import replace

import pytest
from faults import CFG, COOL, Fault, named, report, weights
from peer import Peer

from jaxmoe.model.config import to_hf
from jaxmoe.reconcile.handshake import Handshake, config_finding, shake, unlike
from jaxmoe.reconcile.hypotheses import hypotheses

TOLD = to_hf(CFG, dtype="float32")
WORKER = {"model": TOLD, "logprobs_mode": "processed_logprobs", "label": "v3", "stale": [],
          "unreadable": []}  # fmt: skip


def test_its_own_config_is_not_unlike():
    assert unlike(TOLD, CFG) == {}
    assert unlike({}, CFG) == {}  # of an older plugin, which tells nothing
    parameters = {"rope_type": "default", "rope_theta": CFG.rope_theta}
    plain = replace(CFG, rope_factor=1.0)
    assert unlike({"rope_parameters": parameters, "rope_scaling": None}, plain) == {}


@pytest.mark.parametrize(
    "field, key, other",
    [
        ("vocab_size", "vocab_size", 128), ("d_model", "hidden_size", 64),
        ("experts_per_token", "num_experts_per_tok", 2), ("sliding_window", "sliding_window", 8),
        ("swiglu_limit", "swiglu_limit", 7.0), ("rms_eps", "rms_norm_eps", 1e-6),
        ("rope_theta", "rope_theta", 1e4),
    ],
)  # fmt: skip
def test_each_field_that_differs_is_found(field, key, other):
    assert unlike(TOLD | {key: other}, CFG) == {field: other}
    finding = config_finding({field: other}, CFG)
    assert f"{key} {getattr(CFG, field)}" in finding.must and f"{key} {other}" in finding.got


def test_a_field_of_rope_that_differs_is_found():
    rope = TOLD["rope_scaling"] | {"factor": 16.0, "truncate": True}
    other = unlike(TOLD | {"rope_scaling": rope}, CFG)
    assert other == {"rope_factor": 16.0, "rope_truncate": True}


def test_what_it_vouches_for_is_out():
    def tried(worker):
        known = dict(previous=weights(1), has_log_kept=True, told=shake([WORKER | worker], CFG))
        return {
            h.name for some in hypotheses(CFG, replace(COOL, top_k=9), **known) for h in some
        }  # fmt: skip

    dtypes = {name for name in tried({"model": {}}) if name.startswith("all_")}
    assert dtypes and not dtypes & tried({})
    for name, worker in {
        "stale_head": {"unreadable": ["lm_head.weight"]},
        "stale_everything": {"label": None},  # its live tensors are others by now
        "raw_logprobs": {"logprobs_mode": "raw_logprobs"},
        "kept_mass_twice": {"logprobs_mode": None},
    }.items():
        assert name in tried(worker) and name not in tried({})
    assert shake([], CFG) == Handshake()
    assert shake([WORKER, WORKER | {"model": TOLD | {"dtype": "bfloat16"}}], CFG).dtype is None


@pytest.mark.slow  # two reports
def test_an_engine_of_another_config_is_named_by_it():
    peer, told = Peer(active=3, eps=1e-3), dict(experts_per_token=3, rms_eps=1e-3)
    r = report(Fault(peer), told=Handshake("float32", other=told))
    assert named(r) == ("engine_config",)
    assert "num_experts_per_tok 4" in r.verdict.faults[0].must
    wrong = report(Fault(Peer(sinks=False)), told=Handshake("float32", other=dict(rms_eps=1e-3)))
    assert named(wrong) != ("engine_config",)
