# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns: the engine's log-probs are the trainer's, for any schedule."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.model import plain_ops
from jaxmoe.records import StopReason
from tests.jaxmoe.rollout.native_episodes import (
    CFG,
    INVARIANT,
    PROMPTS,
    SAMPLING,
    STOPS,
    check_structure,
    largest_gap,
    open_engine,
)
from tests.jaxmoe.rollout.scripted_environment import ScriptedEnvironment


@pytest.fixture(scope="module")
def engine():
    return open_engine(keep_experts=True)


def test_log_probs_of_all_turns_match_the_trainers(engine):
    environment = ScriptedEnvironment(97)
    rollouts = engine.generate(PROMPTS, SAMPLING, seed=4, samples=4, environment=environment)
    check_structure(rollouts, environment)
    assert largest_gap(rollouts, CFG, plain_ops()) < 1e-5
    stops = {r.stop for r in rollouts}
    assert {StopReason.STOP_TOKEN, StopReason.MAX_TOKENS} <= stops
    assert max(len(r.turns) for r in rollouts) == 5
    assert min(len(r.turns) for r in rollouts) < 5


@pytest.mark.slow
def test_a_run_compiles_at_most_eight_programs():
    engine = open_engine()
    for seed in range(3):
        environment = ScriptedEnvironment(97, longest=100)
        engine.generate(PROMPTS, SAMPLING, seed=seed, samples=4, environment=environment)
    assert engine.count_compilations() <= 8


def test_the_limits_of_an_episode_name_their_reason(engine):
    def sample(longest=3, **limits):
        environment = ScriptedEnvironment(97, turns=99, longest=longest)
        sampling = replace(SAMPLING, **limits)
        return engine.generate(PROMPTS, sampling, seed=1, samples=4, environment=environment)

    few = sample(max_turns=2)
    assert {r.stop for r in few} == {StopReason.MAX_TURNS, StopReason.MAX_TOKENS}
    assert all(len(r.turns) == 2 for r in few if r.stop is StopReason.MAX_TURNS)
    full = sample(longest=60, max_context=90)
    assert StopReason.CONTEXT_FULL in {r.stop for r in full}
    assert max(len(r.prompt.tokens) + len(r.tokens) for r in full) <= 90
    short = sample(max_new_tokens=30)
    assert all(r.n_sampled <= 30 for r in short)
    assert all(r.stop.is_truncation for r in short if r.tokens[-1] not in STOPS)


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.slow) for d in ("float32", "bfloat16")]
)
def test_any_schedule_gives_the_same_invariant_bits(dtype):
    cfg = replace(CFG, dtype=dtype, numerics="invariant")
    ops, sampling = INVARIANT, replace(SAMPLING, top_k=50, top_p=0.98)
    engine = open_engine(cfg, ops, keep_experts=True)
    settings = [dict(), dict(delays_s=(0.0, 0.0, 0.3), patience_s=0.1)]
    results = []
    for setting in settings:
        environment = ScriptedEnvironment(97, longest=200, **setting)
        results.append(
            engine.generate(PROMPTS, sampling, seed=2, samples=4, environment=environment)
        )
        check_structure(results[-1], environment)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)
        np.testing.assert_array_equal(a.routed_experts, b.routed_experts)
    full = [replace(r, rollout_logp=r.rollout_logp + r.log_kept) for r in results[1]]
    assert largest_gap(full, cfg, ops) == 0.0


def test_an_engine_of_single_answers_refuses_an_environment():
    engine = open_engine(max_context=0)
    with pytest.raises(ConfigError, match=r"rollout\.max_context"):
        engine.generate(PROMPTS, SAMPLING, seed=0, environment=ScriptedEnvironment(97))


def test_a_context_limit_beyond_the_cache_is_refused(engine):
    with pytest.raises(ConfigError, match=r"rollout\.max_context=300"):
        engine.generate(
            PROMPTS,
            replace(SAMPLING, max_context=300),
            seed=0,
            environment=ScriptedEnvironment(97, turns=99, longest=60),
        )


@pytest.mark.slow  # about 10 s of a core for each window
@pytest.mark.parametrize("window", [9, 150])
def test_long_replies_are_read_as_by_the_trainer(window):
    cfg = replace(CFG, sliding_window=window)
    engine = open_engine(cfg, keep_experts=True, max_rows=9, max_context=900)
    # 129 tokens are one more than a call reads, 257 and the turn's last token a third call.
    environment = ScriptedEnvironment(97, turns=3, shortest=120, longest=260)
    sampling = replace(SAMPLING, max_context=900)
    rollouts = engine.generate(PROMPTS, sampling, seed=4, environment=environment)
    check_structure(rollouts, environment, 900)
    assert max(len(r.tokens) for r in rollouts) > 400
    assert largest_gap(rollouts, cfg, plain_ops(), 900) < 1e-5


def test_a_reply_without_tokens_is_refused(engine):
    environment = ScriptedEnvironment(97)
    environment.reply = lambda episode, turn: []
    with pytest.raises(EngineError, match="at least one token"):
        engine.generate(PROMPTS, SAMPLING, seed=0, samples=4, environment=environment)


@pytest.mark.slow
def test_more_prompts_than_rows_give_equal_episodes():
    cfg = replace(CFG, numerics="invariant")
    results = []
    for max_rows in (36, 8):  # the last of five batches has two rows without a prompt
        engine = open_engine(cfg, INVARIANT, max_rows=max_rows, keep_experts=True)
        environment = ScriptedEnvironment(97)
        results.append(
            engine.generate(PROMPTS, SAMPLING, seed=4, samples=4, environment=environment)
        )
        check_structure(results[-1], environment)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)
        np.testing.assert_array_equal(a.routed_experts, b.routed_experts)
        assert a.stop is b.stop
