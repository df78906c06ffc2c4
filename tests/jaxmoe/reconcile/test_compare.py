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

from jaxmoe.config import ConfigError
from jaxmoe.model import forward, sequence_logprobs
from jaxmoe.model.rounded import map_experts
from jaxmoe.reconcile.checks import run_checks
from jaxmoe.reconcile.compare import explain_gap
from jaxmoe.reconcile.handshake import Handshake
from jaxmoe.reconcile.recompute import Programs
from jaxmoe.reconcile.variants import pad_rollouts, trainer_variant
from tests.jaxmoe.reconcile.faults import (
    CFG,
    COOL,
    HALF,
    OPS,
    RUN,
    Fault,
    layer_of,
    make_older_weights,
    make_report,
    make_rollouts,
    make_weights,
    name_faults,
    quantise_experts,
    round_to_eighth,
)
from tests.jaxmoe.reconcile.peer import Peer


def test_unchanged_it_is_the_trainer():
    rollouts_made = make_rollouts(Fault(), 0)
    rows = pad_rollouts(rollouts_made, CFG)
    v = trainer_variant(make_weights(0), CFG, COOL, rows)
    tokens, segments = jnp.asarray(rows.tokens_BT), jnp.asarray(rows.segments_BT)
    no_replay = jnp.full_like(jnp.asarray(rows.replay_LBTA), -1)
    hidden, experts, margin, regret = RUN.trunk(
        v.params, tokens, segments, no_replay, v.knobs, cfg=CFG
    )
    actual, _, log_kept, _ = RUN.head(
        v.params, hidden, tokens, v.knobs, cfg=replace(CFG, sliding_window=1), top_k=0, top_p=1.0
    )

    @jax.jit
    def trainer_logp(params):
        hidden, _, recorded = forward(params, tokens, CFG, OPS, segment_ids_BT=segments)
        return sequence_logprobs(params, hidden, tokens, CFG, OPS, temperature=0.7)[0], recorded[
            "experts_BTA"
        ]

    logp, chosen = trainer_logp(make_weights(0))
    gap = np.abs(np.asarray(actual) - np.asarray(logp))[rows.sampled_BT]
    assert gap.max() <= 64 * np.finfo(np.float32).eps
    np.testing.assert_array_equal(experts, chosen)
    assert float(np.abs(log_kept).max()) == 0.0
    assert float(regret.max()) == 0.0 < float(margin.min())


@pytest.mark.parametrize("cfg", [CFG, pytest.param(HALF, marks=pytest.mark.slow)])
def test_without_a_fault_they_agree(cfg):
    for seed in (0, 1, 2) if cfg is CFG else (0,):
        r = make_report(Fault(), seed, cfg)
        assert name_faults(r) == ("agree",) and r.agrees
        assert all(x.regret <= 1e-5 for x in r.layers) or cfg is HALF


def test_a_fault_of_a_bfloat16_engine_is_named():
    rollouts_made = make_rollouts(Fault(Peer(sinks=False)), 0, "bfloat16")
    r = explain_gap(
        rollouts_made, make_weights(0), CFG, COOL, run=RUN, handshake=Handshake("bfloat16")
    )
    assert name_faults(r) == ("sinks_off", "all_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("stale", [(), ("sinks",)])
def test_requested_expert_rounding_is_named_with_other_faults(stale):
    def round_engine(params):
        return map_experts(lambda x: jnp.asarray(round_to_eighth(np.asarray(x))), params)

    def round_both(params):
        return layer_of(quantise_experts, "full")(layer_of(quantise_experts)(params))

    fault = Fault(Peer(changed=round_both), stale=stale)
    r = make_report(fault, previous=round_engine(make_older_weights(0)), round_engine=round_engine)
    assert sorted(name_faults(r)) == ["experts_rounded", *(f"stale_{name}" for name in stale)]


def test_too_few_tokens_are_refused():
    rollouts_made = make_rollouts(Fault(), 0, count=1, length=8)
    with pytest.raises(ConfigError, match="needs at least 32 sampled tokens"):
        explain_gap(rollouts_made, make_weights(0), CFG, COOL, run=RUN)


def test_the_worst_tokens_and_layers_are_shown():
    r = make_report(Fault(Peer(switch=0.1)), 0)
    gaps = [abs(t.engine - t.trainer) for t in r.worst]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] == pytest.approx(
        r.metrics["train_rollout_logprob_abs_diff_max"], rel=1e-5
    )
    assert [x.layer for x in r.layers] == [0, 1]
    assert all(0.05 < x.switched_replayed < 0.2 for x in r.layers)
    assert r.replayed is not None and r.replayed < 1e-4 * r.verdict.gap


def test_checks_name_what_needs_no_recomputation():
    rollouts_made = make_rollouts(Fault(), 0, count=2)
    rollouts_made = [replace(r, prompt=replace(r.prompt, text="ab")) for r in rollouts_made]

    def list_findings(
        rollouts=rollouts_made, encode=lambda prompt: rollouts_made[0].prompt.tokens, **options
    ):
        return [f.name for f in run_checks(rollouts[:1], COOL, 97, 0, encode=encode, **options)]

    assert list_findings() == []
    assert list_findings(encode=lambda prompt: [1, 2]) == ["tokeniser_own"]
    assert list_findings(engine_encode=lambda prompt: [0, *rollouts_made[0].prompt.tokens]) == [
        "tokeniser_engine"
    ]
    old = [replace(rollouts_made[0], weight_versions=np.full(33, 3, np.int32))]
    assert list_findings(old) == ["version"]
    high = [replace(rollouts_made[0], tokens=np.r_[99, rollouts_made[0].tokens[1:]])]
    assert list_findings(high) == ["unknown_ids"]
    stop = replace(COOL, stop_ids=(int(rollouts_made[0].tokens[4]),))
    encode = lambda prompt: rollouts_made[0].prompt.tokens  # noqa: E731
    assert [f.name for f in run_checks(rollouts_made[:1], stop, 97, 0, encode=encode)] == [
        "stop_ids"
    ]
    loaded = {"stale": ["model.norm.weight"], "received": {"lm_head.weight": "aa"}}
    assert list_findings(loaded=loaded) == ["stale_tensors"]
    assert list_findings(loaded=loaded | {"stale": []}, expected={"lm_head.weight": "bb"}) == [
        "stale_tensors"
    ]
    assert list_findings(loaded=loaded | {"stale": []}, expected={"lm_head.weight": "aa"}) == []


def break_rollout(rollouts_made, row, **changes):
    return [*rollouts_made[:row], replace(rollouts_made[row], **changes), *rollouts_made[row + 1 :]]


REPEATED_IDS = np.full(33, 7, np.int32)
ROLLOUTS = make_rollouts(Fault(), 0)
NAN = np.r_[ROLLOUTS[2].rollout_logp[:5], np.nan, ROLLOUTS[2].rollout_logp[6:]]
EMPTY = dict(tokens=REPEATED_IDS[:0], rollout_logp=np.zeros(0, np.float32), routed_experts=None)


@pytest.mark.parametrize(
    "rollouts_made, reason",
    [
        (
            break_rollout(ROLLOUTS, 2, rollout_logp=NAN),
            "1 of .* not finite: nan at token 5 of answer 2",
        ),
        (
            break_rollout(ROLLOUTS, 0, rollout_logp=REPEATED_IDS * np.float32(-np.inf)),
            "33 of .* not finite: -inf",
        ),
        (
            break_rollout(ROLLOUTS, 0, rollout_logp=REPEATED_IDS[:9] * -1.0),
            "one log-prob for each token: 9 for 33",
        ),
        (
            [replace(r, tokens=REPEATED_IDS) for r in ROLLOUTS],
            "all 231 sampled tokens are the same, 7",
        ),
        ([ROLLOUTS[0]] * 7, "all 7 answers are the same,"),
        ([replace(r, **EMPTY) for r in ROLLOUTS], "all 7 answers are empty"),
        (break_rollout(ROLLOUTS, 1, tokens=REPEATED_IDS + 90), r"not in \[0, 97\), such as 97"),
    ],
)
def test_what_tells_no_cause_is_not_judged(rollouts_made, reason):
    r = explain_gap(rollouts_made, make_weights(0), CFG, COOL, run=Programs(None, None))
    assert (r.verdict.kind, r.verdict.faults, r.agrees) == ("not judged", (), False)
    assert re.search(reason, r.verdict.reason)


def test_empty_answers_and_positive_log_probs_are_findings():
    def list_findings(rollouts_made):
        options = dict(encode=lambda prompt: prompt.tokens)
        return [f.name for f in run_checks(rollouts_made, COOL, 97, 0, **options)]

    assert list_findings(ROLLOUTS) == []
    with_empty = break_rollout(ROLLOUTS, 3, **EMPTY, weight_versions=REPEATED_IDS[:0])
    assert list_findings(with_empty) == ["empty_answers"]
    assert list_findings(break_rollout(ROLLOUTS, 3, rollout_logp=-ROLLOUTS[3].rollout_logp)) == [
        "positive_logprobs"
    ]
    r = explain_gap(with_empty, make_weights(0), CFG, COOL, run=RUN)
    assert r.verdict.kind == "agree" and r.metrics["tokens"] == 6 * 33


def make_episodes():
    """The rollouts of the peer, with garbage at tokens 9 to 14, as those of an environment."""
    mask = np.ones(33, bool)
    mask[9:15] = False
    garbage = np.resize(np.array([np.nan, 7.0, -1e30], np.float32), 33)
    return [
        replace(
            r,
            policy_mask=mask,
            rollout_logp=np.where(mask, r.rollout_logp, garbage),
            log_kept=np.where(mask, np.float32(0), garbage),
            weight_versions=np.where(mask, 0, -5).astype(np.int32),
        )
        for r in ROLLOUTS
    ]


@pytest.mark.slow
def test_environment_tokens_of_an_engine_are_not_compared():
    episodes = make_episodes()
    r = explain_gap(episodes, make_weights(0), CFG, COOL, run=RUN)
    assert name_faults(r) == ("agree",) and r.metrics["tokens"] == 7 * 27
    assert len(r.worst) == 8 and all(not 9 <= t.position < 15 for t in r.worst)
    shifted = [replace(e, rollout_logp=e.rollout_logp - np.float32(0.5)) for e in episodes]
    assert name_faults(explain_gap(shifted, make_weights(0), CFG, COOL, run=RUN)) != ("agree",)


def test_checks_skip_environment_tokens_and_inner_stops():
    def list_findings(rollouts, stop=()):
        options = dict(encode=lambda prompt: prompt.tokens)
        return [
            f.name for f in run_checks(rollouts, replace(COOL, stop_ids=stop), 97, 0, **options)
        ]

    episode = make_episodes()[0]
    tokens = episode.tokens.copy()
    tokens[[8, 11, 32]] = 5  # at the end of each turn, and in the reply
    assert list_findings([episode]) == []
    assert list_findings([replace(episode, tokens=tokens)], (5,)) == []
    tokens[4] = 5
    assert list_findings([replace(episode, tokens=tokens)], (5,)) == ["stop_ids"]
