# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine keeps the Engine's contract, over a stand-in and (marker vllm) over vLLM."""

from dataclasses import replace

import numpy as np
import pytest
from stand_in import StandIn
from vllm_cases import CFG, NEW, PROMPT, open_engine, prompts, trainer, weights

from jaxmoe.config import ConfigError
from jaxmoe.records import Prompt, Sampling, StopReason
from jaxmoe.rollout.engine import Engine

FREE = Sampling(NEW, ())
STOPPING = Sampling(NEW, tuple(range(5, 13)))
SMALL = Sampling(6, ())


def assert_equal_rollouts(a, b):
    return all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))


def test_it_is_an_engine(engine):
    assert isinstance(engine, Engine) and len(engine.backends) == 1


def test_rollouts_are_in_prompt_order_with_their_version(engine):
    requested = prompts(5)
    out = engine.generate(requested, STOPPING, seed=1, samples=3)
    assert [r.prompt for r in out] == [p for p in requested for _ in range(3)]
    assert {r.stop for r in out} == {StopReason.STOP_TOKEN, StopReason.MAX_TOKENS}
    for r in out:
        n = len(r.tokens)
        assert r.tokens.dtype == np.int32 and r.rollout_logp.dtype == np.float32
        assert 1 <= n <= NEW and r.rollout_logp.shape == r.weight_versions.shape == (n,)
        assert (r.weight_versions == 3).all() and r.log_kept is None
        stops = np.isin(r.tokens, STOPPING.stop_ids)
        assert not stops[:-1].any() and stops[-1] == (r.stop == StopReason.STOP_TOKEN)
        assert r.stop == StopReason.STOP_TOKEN or n == NEW
        assert r.routed_experts is not None
        assert r.routed_experts.shape == (len(r.prompt.tokens) + n - 1, 2, 2)


def test_log_probs_are_the_trainers(engine):
    for r in engine.generate(prompts(3), FREE, seed=2, samples=2):
        np.testing.assert_allclose(r.rollout_logp, trainer(weights(0), r), atol=5e-5)


def test_a_seed_repeats_tokens_and_another_does_not(engine):
    a, b, c = (engine.generate(prompts(3), SMALL, seed=s, samples=4) for s in (5, 5, 6))
    assert assert_equal_rollouts(a, b) and not assert_equal_rollouts(a, c)
    assert len({tuple(r.tokens.tolist()) for r in a}) == 12


def test_a_row_does_not_depend_on_its_companions(engine):
    a = engine.generate(prompts(4), SMALL, seed=5, samples=2)
    mixed = [prompts(1)[0], *prompts(2, first=30), prompts(4)[3]]
    b = engine.generate(mixed, SMALL, seed=5, samples=2)
    assert (
        assert_equal_rollouts(a[:2], b[:2])
        and assert_equal_rollouts(a[6:], b[6:])
        and not assert_equal_rollouts(a[2:4], b[2:4])
    )


@pytest.mark.parametrize("limited_by", ["the engine", "its server"])
def test_samples_beyond_the_rows_are_requested_in_parts(tmp_path, limited_by):
    """Requests of more samples than rows are split, and the samples do not depend on it."""
    engine_rows, server_rows = (3, 4) if limited_by == "the engine" else (33, 3)
    engines = []
    for rows, served in ((engine_rows, server_rows), (32, 32)):
        server = StandIn(CFG, rows=served)
        engine = open_engine(server.url, tmp_path, retries=0, max_rows=rows)
        engine.load(weights(0), 3)
        server.requests.clear()
        engines.append(engine.generate(prompts(2), SMALL, seed=5, samples=8))
        counts = [request["sampling_params"]["n"] for request in server.requests]
        assert sorted(counts) == ([2, 2, 3, 3, 3, 3] if rows == engine_rows else [8, 8])
        engine.close()
        server.crash()
    assert assert_equal_rollouts(*engines)


def test_repeated_prompts_have_separate_answers(engine):
    out = engine.generate(prompts(1) * 2, SMALL, seed=5, samples=3)
    assert len({tuple(r.tokens.tolist()) for r in out}) == 6


def test_greedy_samples_are_equal_and_the_likeliest(engine):
    out = engine.generate(prompts(2), Sampling(5, (), temperature=0.0), seed=1, samples=2)
    assert assert_equal_rollouts(out[:1], out[1:2])
    scores = engine.score([[*r.prompt.tokens, *r.tokens.tolist()] for r in out])
    for r, logp in zip(out, scores, strict=True):
        np.testing.assert_allclose(r.rollout_logp, logp[-5:], atol=5e-5)
        alternatives = [
            [*r.prompt.tokens, *r.tokens[:-1].tolist(), t] for t in range(0, CFG.vocab_size, 16)
        ]
        assert max(s[-1] for s in engine.score(alternatives)) <= logp[-1] + 1e-5


def test_log_probs_are_of_the_tempered_distribution(engine):
    (r,) = engine.generate(prompts(1), Sampling(NEW, (), temperature=0.5), seed=1)
    raw = trainer(weights(0), r)
    assert np.abs(r.rollout_logp - raw).max() > 0.1


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.6}])
def test_a_cut_is_reported_by_its_mass(engine, cut):
    """rollout_logp + log_kept is the log-prob over the whole vocabulary: Engine's contract."""
    out = engine.generate(prompts(3), Sampling(NEW, (), **cut), seed=1, samples=2)
    for r in out:
        assert r.log_kept is not None and (r.log_kept <= 0).all() and r.log_kept.min() < -0.05
        full_logp = r.rollout_logp + r.log_kept
        np.testing.assert_allclose(full_logp, trainer(weights(0), r), atol=5e-5)


def test_a_cut_at_another_temperature_is_refused(engine):
    with pytest.raises(ConfigError, match="rollout.temperature must be 1 if top_k"):
        engine.generate(prompts(1), Sampling(5, (), temperature=0.7, top_k=4), seed=0)


def test_score_equals_the_trainers_log_probs(engine):
    sequences = [list(p.tokens) for p in prompts(4)] + [[7]]
    for ids, logp in zip(sequences, engine.score(sequences), strict=True):
        assert logp.dtype == np.float32 and logp.shape == (len(ids),) and logp[0] == 0
        if len(ids) > 1:
            r = engine.generate([Prompt(0, "", tuple(ids[:1]), None)], Sampling(1, ()), seed=0)[0]
            full_logp = trainer(weights(0), replace_tokens(r, ids[1:]))
            np.testing.assert_allclose(logp[1:], full_logp, atol=5e-5)


def replace_tokens(rollout, tokens):
    return replace(rollout, tokens=np.asarray(tokens, np.int32))


def test_too_long_prompts_or_budgets_are_refused(engine):
    long = Prompt(0, "", tuple([1] * (PROMPT + 1)), None)
    with pytest.raises(ConfigError, match=f"data.max_prompt_tokens={PROMPT + 1}"):
        engine.generate([long], SMALL, seed=0)
    with pytest.raises(ConfigError, match=f"rollout.max_new_tokens={NEW + 1}"):
        engine.generate(prompts(1), Sampling(NEW + 1, ()), seed=0)


def test_an_open_update_is_ended_first(engine):
    (backend,), before = engine.backends, list(engine.incidents)
    backend.pause("abort")
    backend.start_update()
    engine.load(weights(0), 3)
    assert engine.incidents == before
    assert len(engine.generate(prompts(2), FREE, seed=4)) == 2


def test_new_weights_are_sampled_from_at_once(engine):
    """Last: the module's engine goes on with other weights, then with its first again."""
    requested = prompts(2)
    before = engine.generate(requested, FREE, seed=4)
    for version in range(4, 9):  # past the first two files
        engine.load(weights(version), version)
        for r in engine.generate(requested, FREE, seed=4):
            assert (r.weight_versions == version).all()
            np.testing.assert_allclose(r.rollout_logp, trainer(weights(version), r), atol=5e-5)
    engine.load(weights(0), 9)
    assert assert_equal_rollouts(before, engine.generate(requested, FREE, seed=4))
