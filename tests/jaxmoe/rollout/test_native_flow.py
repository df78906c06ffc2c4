# SPDX-License-Identifier: Apache-2.0
"""Refilled rows: the tokens of a batch of their own, and each log-prob of its own version."""

import itertools
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.model import plain_ops
from jaxmoe.records import StopReason
from jaxmoe.rollout.native_flow import CHUNK_TOKENS, FlowEngine
from tests.jaxmoe.random_weights import random_weights
from tests.jaxmoe.rollout.native_episodes import (
    CFG,
    INVARIANT,
    PROMPTS,
    SAMPLING,
    open_engine,
    score,
    weights,
)
from tests.jaxmoe.rollout.scripted_environment import ScriptedEnvironment

EXACT = replace(CFG, numerics="invariant")
SAMPLES, FIRST = 4, 3  # samples of a prompt; the first version
FREE = replace(SAMPLING, stop_ids=(), max_turn_tokens=0)


def open_flow(cfg=EXACT, ops=INVARIANT, *, recompute=False, **sizes):
    """An engine of three prompts' rows, which are refilled by those of others."""
    defaults = dict(
        max_prompt_tokens=50, max_new_tokens=80, max_rows=12, max_context=280, keep_experts=True
    )
    engine = FlowEngine(cfg, ops, recompute=recompute, **defaults | sizes)
    engine.load(weights(), FIRST)
    return engine


def sample_groups(flow, sampling, prompts=PROMPTS, environment=lambda: None):
    """What each prompt's thread returned or raised."""
    results: list = [None] * len(prompts)

    def sample(i):
        try:
            results[i] = flow.generate(
                [prompts[i]], sampling, seed=i, samples=SAMPLES, environment=environment()
            )
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=sample, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def flat(groups):
    assert not [group for group in groups if not isinstance(group, list)], groups
    return [rollout for group in groups for rollout in group]


def check_equal(rollouts, expected):
    names = "tokens rollout_logp log_kept routed_experts weight_versions sampled_mask".split()
    for a, b in zip(rollouts, expected, strict=True):
        assert (a.prompt.id, a.stop) == (b.prompt.id, b.stop)
        for name in names:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


EPISODES = pytest.mark.parametrize(
    "is_episode", [False, pytest.param(True, marks=pytest.mark.slow)]
)


@EPISODES
def test_refilled_rows_have_the_bits_of_own_batches(is_episode):
    """With late replies, stop tokens, limits, top-k, top-p and experts."""
    sampling = replace(SAMPLING, top_k=50, top_p=0.98)

    def environment(**late):
        return ScriptedEnvironment(97, longest=60, **late) if is_episode else None

    pinned = open_engine(EXACT, INVARIANT, keep_experts=True).pin()
    own = sample_groups(pinned, sampling, environment=environment)
    with closing(open_flow()) as engine:
        late = partial(environment, delays_s=(0.0, 0.0, 0.3))
        rollouts = flat(sample_groups(engine.pin(), sampling, environment=late))
    check_equal(rollouts, flat(own))
    assert {StopReason.STOP_TOKEN, StopReason.MAX_TOKENS} <= {r.stop for r in rollouts}
    assert max(len(r.tokens) for r in rollouts) > CHUNK_TOKENS


@pytest.mark.slow
def test_fast_numerics_give_equal_tokens():
    pinned = open_engine(CFG, plain_ops()).pin()
    own = flat(sample_groups(pinned, SAMPLING))
    with closing(open_flow(CFG, plain_ops(), max_context=0)) as engine:
        rollouts = flat(sample_groups(engine.pin(), replace(SAMPLING, max_context=0)))
    for a, b in zip(rollouts, own, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.rollout_logp, b.rollout_logp, rtol=0, atol=1e-5)


@cache
def weights_of(version):
    return weights() if version == FIRST else random_weights(CFG, version)


def gaps_by_versions(rollouts):
    """Largest |Δlogp| of each rollout to the trainer's forward of each token's own version, and
    the number of versions."""
    length = 288
    tokens, segments = np.zeros((2, len(rollouts), length), np.int32)
    for i, r in enumerate(rollouts):
        row = [*r.prompt.tokens, *r.tokens]
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    newest = max(r.weight_versions.max() for r in rollouts)
    logp_VBT = np.stack(
        [
            score(weights_of(version), tokens, segments, EXACT, INVARIANT)[0]
            for version in range(FIRST, newest + 1)
        ]
    )
    gaps = []
    for i, r in enumerate(rollouts):
        places = len(r.prompt.tokens) + np.arange(len(r.tokens))
        gap_T = np.abs(logp_VBT[r.weight_versions - FIRST, i, places] - r.rollout_logp)
        gaps.append((gap_T[r.sampled_mask].max(), len(set(r.weight_versions.tolist()))))
    return gaps


@EPISODES
@pytest.mark.parametrize("recompute", [True, False])
def test_each_log_prob_is_of_its_version(recompute, is_episode):
    """Exactly so if keys are computed again; keys of older weights show."""
    with closing(open_flow(recompute=recompute)) as engine:
        calls, decode = itertools.count(), engine._programs.decode

        def loads(*args, **named):
            if (call := next(calls)) % 2 == 1:
                engine.load(weights_of(version := FIRST + 1 + call // 2), version)
            return decode(*args, **named)

        engine._programs = replace(engine._programs, decode=loads)
        sampling, environment = FREE, lambda: None
        if is_episode:
            sampling, environment = SAMPLING, partial(ScriptedEnvironment, 97, longest=60)
        rollouts = flat(sample_groups(engine.pin(), sampling, PROMPTS[:5], environment))
    gaps = gaps_by_versions(rollouts)
    largest, versions = map(max, zip(*gaps, strict=True))
    assert versions >= 3
    assert largest == 0 if recompute else 0.01 < largest < np.inf
    for r in rollouts:
        assert (np.diff(r.weight_versions) >= 0).all()
    assert not any(gap for gap, n in gaps if n == 1)


def test_answers_begin_with_weights_of_their_admission():
    """Also if they come between the look at the weights and that at the places."""
    engine, later = open_flow(CFG, plain_ops(), keep_experts=False), list[threading.Thread]()
    read, flow, results = engine.read_loaded, engine.pin(), []

    def admit_late():
        loaded = read()
        if threading.current_thread().name == "flow" and not later:
            engine.load(weights_of(FIRST + 1), FIRST + 1)
            later.append(threading.Thread(target=lambda: results.extend(sample(PROMPTS[1]))))
            later[0].start()
            while len(flow._waiting) < 2 * SAMPLES:
                time.sleep(0.001)
        return loaded

    def sample(prompt):
        sampling = replace(FREE, max_new_tokens=CHUNK_TOKENS + 1)
        return flow.generate([prompt], sampling, seed=0, samples=SAMPLES)

    engine.read_loaded = admit_late
    with closing(engine):
        first = sample(PROMPTS[0])
        later[0].join(120)
    assert {r.weight_versions[0] for r in first} == {FIRST}
    assert {v for r in results for v in r.weight_versions.tolist()} == {FIRST + 1}


def test_waiting_for_replies_takes_no_time(monkeypatch):
    """All places wait for replies, and further answers wait for a place."""
    engine, chunks = open_flow(CFG, plain_ops(), keep_experts=False), []
    read = engine.read_loaded

    def count():
        chunks.append(1)
        return read()

    monkeypatch.setattr(engine, "read_loaded", count)
    environment = ScriptedEnvironment(97, turns=1, delays_s=(1.0,), threads=64)
    with closing(engine):
        rollouts = flat(sample_groups(engine.pin(), SAMPLING, environment=lambda: environment))
    assert len(PROMPTS) > 3 and len(rollouts) == SAMPLES * len(PROMPTS)
    assert len(chunks) < 300  # a thread that never slept read them thousands of times


def test_an_error_reaches_every_thread():
    engine = open_flow()

    def breaks(*_):
        raise RuntimeError("the device broke.")

    engine.prefill_rows = breaks
    results = sample_groups(engine.pin(), FREE)
    assert all(isinstance(x, RuntimeError) and "device broke" in str(x) for x in results)
    with pytest.raises(RuntimeError, match="device broke"):
        engine.pin().generate(PROMPTS[:1], FREE, seed=0, samples=SAMPLES)


def test_close_ends_every_thread():
    engine = open_flow()
    prefill = engine.prefill_rows

    def closes(*args):
        engine.close()
        return prefill(*args)

    engine.prefill_rows = closes
    for results in (sample_groups(engine.pin(), FREE) for _ in range(2)):
        assert all(isinstance(x, EngineError) and "was closed" in str(x) for x in results)


def test_a_wrong_request_spoils_no_other():
    engine = open_flow()
    with pytest.raises(ConfigError, match=r"max_prompt_tokens=70"):
        long = replace(PROMPTS[0], tokens=(20,) * 70)
        engine.pin().generate([long], FREE, seed=0, samples=SAMPLES)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=81"):
        engine.pin().generate(PROMPTS, replace(FREE, max_new_tokens=81), seed=0)
    engine.close()
    assert all(isinstance(x, EngineError) for x in sample_groups(engine.pin(), FREE, PROMPTS[:1]))
