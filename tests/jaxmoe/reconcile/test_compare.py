# SPDX-License-Identifier: Apache-2.0
"""What a report says where nothing is wrong, where dtypes differ, and where nothing can be said.

The engine is peer.py: numpy, no code of ours. Its faults are in faults.py and test_faults.py.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import (
    CFG,
    COOL,
    FAULTS,
    HALF,
    OPS,
    RUN,
    Fault,
    named,
    report,
    rollouts,
    weights,
)
from peer import Peer

from jaxmoe.config import ConfigError
from jaxmoe.model import forward, sequence_logprobs
from jaxmoe.observe.profiling import compilations
from jaxmoe.reconcile.checks import run_checks
from jaxmoe.reconcile.compare import reconcile
from jaxmoe.reconcile.handshake import Handshake
from jaxmoe.reconcile.recompute import Programs
from jaxmoe.reconcile.variants import sampled_rows, unchanged


def test_unchanged_it_is_the_trainer():
    made = rollouts(Fault(), 0)
    rows = sampled_rows(made, CFG)
    v = unchanged(weights(0), CFG, COOL, rows)
    tokens, segments = jnp.asarray(rows.tokens_BT), jnp.asarray(rows.segments_BT)
    own = jnp.full_like(jnp.asarray(rows.replay_LBTA), -1)
    hidden, experts, margin, regret = RUN.trunk(v.params, tokens, segments, own, v.knobs, cfg=CFG)
    ours, _, kept, _ = RUN.head(
        v.params, hidden, tokens, v.knobs, cfg=replace(CFG, sliding_window=1), top_k=0, top_p=1.0
    )

    @jax.jit
    def trainer(params):
        hidden, _, chosen = forward(params, tokens, CFG, OPS, segment_ids_BT=segments)
        return sequence_logprobs(params, hidden, tokens, CFG, OPS, temperature=0.7)[0], chosen

    logp, chosen = trainer(weights(0))
    gap = np.abs(np.asarray(ours) - np.asarray(logp))[rows.sampled_BT]
    assert gap.max() <= 64 * np.finfo(np.float32).eps
    np.testing.assert_array_equal(experts, chosen)
    assert float(np.abs(kept).max()) == 0.0
    assert float(regret.max()) == 0.0 < float(margin.min())


@pytest.mark.parametrize("cfg", [CFG, pytest.param(HALF, marks=pytest.mark.slow)])
def test_without_a_fault_they_agree(cfg):
    for seed in (0, 1, 2) if cfg is CFG else (0,):
        r = report(Fault(), seed, cfg)
        assert named(r) == ("agree",) and r.agrees
        assert all(x.regret <= 1e-5 for x in r.layers) or cfg is HALF


def test_an_engine_in_bfloat16_is_named_beside_a_trainer_in_float32():
    made = rollouts(Fault(), 0, "bfloat16")
    r = reconcile(made, weights(0), CFG, COOL, run=RUN, told=Handshake("bfloat16"))
    assert named(r) == ("all_bfloat16",)
    assert "in size" in r.verdict.why


def test_a_fault_is_seen_behind_an_engine_in_bfloat16():
    made = rollouts(Fault(Peer(sinks=False)), 0, "bfloat16")
    r = reconcile(made, weights(0), CFG, COOL, run=RUN, told=Handshake("bfloat16"))
    assert named(r) == ("sinks_off", "all_bfloat16")


def test_few_programs_are_compiled():
    report(FAULTS["window_off"], run=RUN)
    before = compilations(RUN.trunk), compilations(RUN.head)
    report(FAULTS["sinks_off"], run=RUN)
    report(Fault(Peer(theta=1e4)), run=RUN)
    assert (compilations(RUN.trunk), compilations(RUN.head)) == before  # a window is one more
    assert before[0] <= 8


def test_too_few_tokens_are_refused():
    made = rollouts(Fault(), 0, count=1, length=8)
    with pytest.raises(ConfigError, match="at least 32 sampled tokens"):
        reconcile(made, weights(0), CFG, COOL, run=RUN)


def test_the_worst_tokens_and_layers_are_shown():
    r = report(Fault(Peer(switch=0.1)), 0)
    gaps = [abs(t.engine - t.trainer) for t in r.worst]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] == pytest.approx(
        r.metrics["train_rollout_logprob_abs_diff_max"], rel=1e-5
    )
    assert [x.layer for x in r.layers] == [0, 1]
    assert all(0.05 < x.switched_here < 0.2 for x in r.layers)
    assert r.replayed is not None and r.replayed < 1e-4 * r.verdict.gap


def test_checks_name_what_needs_no_recomputation():
    made = rollouts(Fault(), 0, count=2)
    made = [replace(r, prompt=replace(r.prompt, text="ab")) for r in made]

    def found(rollouts=made, encode=lambda prompt: made[0].prompt.tokens, **options):
        return [f.name for f in run_checks(rollouts[:1], COOL, 97, 0, encode=encode, **options)]

    assert found() == []
    assert found(encode=lambda prompt: [1, 2]) == ["tokeniser_own"]
    assert found(their_encode=lambda prompt: [0, *made[0].prompt.tokens]) == ["tokeniser_engine"]
    old = [replace(made[0], weight_versions=np.full(33, 3, np.int32))]
    assert found(old) == ["version"]
    high = [replace(made[0], tokens=np.r_[99, made[0].tokens[1:]])]
    assert found(high) == ["unknown_ids"]
    stop = replace(COOL, stop_ids=(int(made[0].tokens[4]),))
    encode = lambda prompt: made[0].prompt.tokens  # noqa: E731
    assert [f.name for f in run_checks(made[:1], stop, 97, 0, encode=encode)] == ["stop_ids"]
    loaded = {"stale": ["model.norm.weight"], "received": {"lm_head.weight": "aa"}}
    assert found(loaded=loaded) == ["stale_tensors"]
    assert found(loaded=loaded | {"stale": []}, expected={"lm_head.weight": "bb"}) == [
        "stale_tensors"
    ]
    assert found(loaded=loaded | {"stale": []}, expected={"lm_head.weight": "aa"}) == []


def broken(made, row, **changes):
    return [*made[:row], replace(made[row], **changes), *made[row + 1 :]]


SAME = np.full(33, 7, np.int32)
MADE = rollouts(Fault(), 0)
NAN = np.r_[MADE[2].rollout_logp[:5], np.nan, MADE[2].rollout_logp[6:]]
EMPTY = dict(tokens=SAME[:0], rollout_logp=np.zeros(0, np.float32), routed_experts=None)


@pytest.mark.parametrize(
    "made, why",
    [
        (broken(MADE, 2, rollout_logp=NAN), "1 of .* not finite: nan at token 5 of answer 2"),
        (broken(MADE, 0, rollout_logp=SAME * np.float32(-np.inf)), "33 of .* not finite: -inf"),
        (broken(MADE, 0, rollout_logp=SAME[:9] * -1.0), "one log-prob for each token: 9 for 33"),
        ([replace(r, tokens=SAME) for r in MADE], "all 231 sampled tokens are the same one, 7"),
        ([MADE[0]] * 7, "all 7 answers are the same one"),
        ([replace(r, **EMPTY) for r in MADE], "each of the 7 answers is empty"),
        (broken(MADE, 1, tokens=SAME + 90), r"not in \[0, 97\), such as 97"),
    ],
)
def test_what_tells_no_cause_is_not_judged(made, why):
    r = reconcile(made, weights(0), CFG, COOL, run=Programs(None, None))
    assert (r.verdict.kind, r.verdict.faults, r.agrees) == ("not judged", (), False)
    assert re.search(why, r.verdict.why)


def test_an_empty_answer_and_a_positive_log_prob_are_findings():
    def found(made):
        known = dict(encode=lambda prompt: prompt.tokens)
        return [f.name for f in run_checks(made, COOL, 97, 0, **known)]

    assert found(MADE) == []
    some = broken(MADE, 3, **EMPTY, weight_versions=SAME[:0])
    assert found(some) == ["empty_answers"]
    assert found(broken(MADE, 3, rollout_logp=-MADE[3].rollout_logp)) == ["positive_logprobs"]
    r = reconcile(some, weights(0), CFG, COOL, run=RUN)
    assert r.verdict.kind == "agree" and r.metrics["tokens"] == 6 * 33
