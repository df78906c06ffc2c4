# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns on vLLM: token ids in and out, limits, seeds, waiting, faults."""

import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import optax
import pytest
from board import as_processes
from episode_cases import CONTEXT, LONG, STOPS, compare_with_trainer, open_loaded
from expert_switches import SWITCHES
from stand_in import StandIn
from turn_replies import Replies
from vllm_cases import CFG, NEW, OPS, PROMPT, open_engine, open_shared, prompts, weights

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.config import ConfigError, EngineError, VllmConfig
from jaxmoe.model.moe.router import replay_routing
from jaxmoe.records import Sampling, StopReason
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import jit_step
from jaxmoe.rollout.replies import NewContext


def assert_equal_episodes(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.tokens.tolist() == y.tokens.tolist() and x.stop == y.stop
        assert x.sampled_mask.tolist() == y.sampled_mask.tolist()
        assert np.array_equal(x.rollout_logp, y.rollout_logp)


@pytest.fixture(
    scope="module",
    params=[
        "stand_in",
        pytest.param("in_process", marks=pytest.mark.vllm),
        pytest.param("server", marks=pytest.mark.vllm),
    ],
)
def engine(request, tmp_path_factory):
    work = tmp_path_factory.mktemp("episodes")
    if request.param == "stand_in":
        server = StandIn(CFG, context=CONTEXT + 1)
        opened = open_engine(server.url, work, max_context=CONTEXT)
    else:
        launch = 1 if request.param == "server" else 0
        opened = open_engine(
            "", work, launch=launch, max_context=CONTEXT, weights_dir=VllmConfig().weights_dir
        )
    opened.load(weights(0), 3)
    yield opened
    opened.close()
    if request.param == "stand_in":
        server.crash()


@pytest.fixture
def server():
    server = StandIn(CFG, context=CONTEXT + 1)
    yield server
    server.crash()


@pytest.mark.slow
def test_five_turns_match_trainer_log_probs_and_experts(engine):
    environment = Replies()
    out = engine.generate(prompts(4), LONG, seed=1, samples=2, environment=environment)
    assert [r.prompt for r in out] == [p for p in prompts(4) for _ in range(2)]
    assert max(len(r.turns) for r in out) == 5
    assert compare_with_trainer(out) < 5e-5
    for i, r in enumerate(out):
        turns = [r.tokens[a:b].tolist() for a, b in r.turns]
        # What ended without a stop token has no reply.
        assert environment.calls[i] == turns[: len(environment.calls[i])]
        assert len(environment.calls[i]) >= len(turns) - 1
        assert not r.rollout_logp[~r.sampled_mask].any()
        assert len(r.weight_versions) == len(r.tokens) and set(r.weight_versions) == {3}


class NewContexts(Replies):
    """Every second reply replaces what the policy has read."""

    def reply(self, episode, turn):
        tokens = super().reply(episode, turn)
        if isinstance(tokens, StopReason) or len(self.calls[episode]) % 2 == 0:
            return tokens
        return NewContext(tuple(tokens * 3))


@pytest.mark.slow
def test_new_contexts_match_the_trainer(engine):
    out = engine.generate(prompts(4), LONG, seed=1, samples=2, environment=NewContexts())
    assert max(len(r.context_starts) for r in out) == 2
    # A server's prefix cache may hide the experts of a context that others began with.
    assert compare_with_trainer(out) < 5e-5


@pytest.mark.slow
def test_a_packed_step_replays_every_expert_of_vllm(engine):
    out = engine.generate(prompts(4), LONG, seed=1, samples=2, environment=Replies())
    assert len({r.stop for r in out if r.stop.is_truncation}) > 1
    batch = rollout_batch(
        out, np.arange(len(out)) % 2, samples=2, length=CONTEXT, pad_id=0, n_experts=CFG.n_experts
    )
    expected_BTLA = np.full((len(out), CONTEXT, CFG.n_layers, CFG.experts_per_token), -1)
    for row, r in zip(expected_BTLA, out, strict=True):
        row[: len(r.routed_experts)] = r.routed_experts
    a, tx = Algorithm(terms=(SWITCHES,)), optax.sgd(0.1)
    scorer = Scorer(CFG, replace(OPS, router=replay_routing), replay="R3")
    step = jit_step(tx=tx, algorithm=a, scorer=scorer)
    state = init_state(Trained(weights(0)), tx)

    def run(expected_BTLA):
        packed, _ = split_minibatches(
            replace(batch, extra={"expected_BTLA": expected_BTLA}),
            a,
            seed=(0,),
            tokens_per_microbatch=2 * CONTEXT,
        )
        return step(state, packed)[1]

    metrics = run(expected_BTLA)
    assert float(metrics["switches"]) == 0.0
    assert float(metrics["train_rollout_logprob_abs_diff_max"]) < 5e-5
    assert float(run(np.roll(expected_BTLA, 1, axis=1))["switches"]) > 10.0


def test_a_seed_repeats_episodes_and_single_answers(engine):
    requested = prompts(3)
    a, b = (
        engine.generate(requested, LONG, seed=5, samples=2, environment=Replies(delay_s=delay_s))
        for delay_s in (0.0, 0.01)
    )
    for x, y in zip(a, b, strict=True):
        assert x.tokens.tolist() == y.tokens.tolist()
    single = engine.generate(requested, LONG, seed=5, samples=2)
    for x, y in zip(a, single, strict=True):
        assert x.tokens[: x.turns[0][1]].tolist() == y.tokens.tolist()


def test_each_turn_has_another_seed(server, tmp_path):
    """Each turn has a seed of its own, also after a sync aborted it."""
    with closing(open_loaded(server, tmp_path)) as opened:
        opened.generate(prompts(2), LONG, seed=5, samples=3, environment=Replies())
    seeds = [
        body["sampling_params"]["seed"]
        for body in server.requests
        if "prompt_logprobs" not in body["sampling_params"]
    ]
    assert len(seeds) > 10 and len(set(seeds)) == len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits, reason",
    [
        (dict(max_turns=2), StopReason.MAX_TURNS),
        (dict(max_turns=9, max_turn_tokens=1), StopReason.MAX_TOKENS),
        (dict(max_turns=9, max_context=PROMPT + 9), StopReason.CONTEXT_FULL),
        (dict(max_turns=1), StopReason.MAX_TURNS),
        (dict(max_turns=99), StopReason.MAX_TOKENS),
    ],
)
def test_limits_end_an_episode_with_their_reason(server, tmp_path, limits, reason):
    sampling = Sampling(NEW, STOPS, **limits)
    with closing(open_loaded(server, tmp_path)) as opened:
        out = opened.generate(prompts(6), sampling, seed=2, samples=2, environment=Replies())
    assert reason in {r.stop for r in out}
    for r in out:
        assert r.sampled_mask[0] and r.sampled_mask[-1] and r.n_sampled <= NEW
        assert len(r.turns) <= sampling.max_turns
        assert all(b - a <= (sampling.max_turn_tokens or NEW) for a, b in r.turns)
        assert len(r.prompt.tokens) + len(r.tokens) <= (sampling.max_context or CONTEXT)
        # A turn that a limit ended has no stop token.
        if r.stop is StopReason.MAX_TOKENS and r.n_sampled < NEW:
            assert r.tokens[-1] not in STOPS


def test_an_environment_ends_an_episode_with_its_reason(server, tmp_path):
    with closing(open_loaded(server, tmp_path)) as opened:
        out = opened.generate(
            prompts(4), Sampling(NEW, STOPS, max_turns=9), seed=2, environment=Replies(turns=2)
        )
    assert {r.stop for r in out} <= {StopReason.STOP_TOKEN, StopReason.MAX_TOKENS}
    assert [r for r in out if r.stop is StopReason.STOP_TOKEN and len(r.turns) == 2]


def test_an_episode_that_waits_holds_no_place(server, tmp_path):
    """With one request in flight at a time, replies of all episodes are computed at once."""
    environment = Replies(turns=2, delay_s=1.0)
    with closing(open_loaded(server, tmp_path, max_rows=1)) as opened:
        out = opened.generate(prompts(8), LONG, seed=1, environment=environment)
    assert len(out) == 8 and environment.most_waiting > 3


def test_a_late_reply_ends_its_own_episode(server, tmp_path):
    release = threading.Event()

    def hang(episode, turn):
        if episode == 1:
            release.wait(60)

    environment = Replies(timeout_s=0.5, act=hang)
    with closing(open_loaded(server, tmp_path)) as opened:
        out = opened.generate(prompts(4), LONG, seed=1, environment=environment)
        undisturbed = opened.generate(prompts(4), LONG, seed=1, environment=Replies())
    assert out[1].stop is StopReason.ENV_TIMEOUT and len(out[1].turns) == 1
    assert environment.reply_threads.n_abandoned == 1
    assert_equal_episodes(out[:1] + out[2:], undisturbed[:1] + undisturbed[2:])
    release.set()


def test_what_an_environment_raises_ends_the_call(server, tmp_path):
    def act(episode, turn):
        raise ZeroDivisionError("of the environment")

    with closing(open_loaded(server, tmp_path)) as opened:
        with pytest.raises(ZeroDivisionError, match="of the environment"):
            opened.generate(prompts(4), LONG, seed=1, environment=Replies(act=act))
        assert len(opened.generate(prompts(2), LONG, seed=1)) == 2  # the engine is as before


def test_closing_ends_an_episode_that_waits(server, tmp_path):
    opened = open_loaded(server, tmp_path)
    closer = threading.Timer(0.5, opened.close)
    environment = Replies(act=lambda *_: time.sleep(20))
    closer.start()
    start = time.monotonic()
    with pytest.raises(EngineError, match="was closed"):
        opened.generate(prompts(2), LONG, seed=1, environment=environment)
    assert time.monotonic() - start < 15
    closer.join()


class Flaky(StandIn):
    """Loses the connection of every third request, and lies in every fifth."""

    n_served = 0
    is_flaky = False

    def do_generate(self, body, query):
        answer = super().do_generate(body, query)
        if not self.is_flaky or "prompt_logprobs" in body["sampling_params"]:
            return answer
        self.n_served += 1
        if self.n_served % 3 == 0:
            raise ConnectionAbortedError
        if self.n_served % 5 == 0:
            answer["choices"][0]["token_ids"].append(1)
        return answer


def test_a_retried_request_gives_the_same_episode(tmp_path):
    server = Flaky(CFG, context=CONTEXT + 1)
    with closing(open_loaded(server, tmp_path, retries=8)) as opened:
        expected = opened.generate(prompts(4), LONG, seed=1, environment=Replies())
        server.is_flaky = True
        environment = Replies()
        out = opened.generate(prompts(4), LONG, seed=1, environment=environment)
        server.is_flaky = False
    assert server.n_served > 8 and opened.incidents
    assert_equal_episodes(out, expected)
    # No turn was replied to twice.
    assert sum(map(len, environment.calls.values())) == sum(
        len(r.turns) - (r.tokens[-1] not in STOPS) for r in out
    )
    server.crash()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_a_sync_between_turns_is_in_the_versions(server, tmp_path, mode):
    with closing(open_loaded(server, tmp_path, on_weight_sync=mode)) as opened:

        def act(episode, turn):
            if (episode, turn) == (0, 1):
                opened.load(weights(1), 4)

        out = opened.generate(
            prompts(4), LONG, seed=1, samples=2, environment=Replies(act=act, delay_s=0.05)
        )
    assert {3, 4} <= {int(v) for r in out for v in r.weight_versions[r.sampled_mask]}
    # A kept request computed a part of what it reads with the older weights.
    limit = 5e-5 if mode != "keep" else 10.0
    assert compare_with_trainer(out, {3: 0, 4: 1}, experts=False) < limit


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.6}])
def test_every_turn_reports_the_mass_of_its_cut(server, tmp_path, cut):
    with closing(open_loaded(server, tmp_path)) as opened:
        out = opened.generate(
            prompts(3), Sampling(NEW, STOPS, max_turns=4, **cut), seed=1, environment=Replies()
        )
    assert max(len(r.turns) for r in out) > 2
    for r in out:
        assert (r.log_kept <= 0).all() and not r.log_kept[~r.sampled_mask].any()
    full = [type(r)(**(vars(r) | {"rollout_logp": r.rollout_logp + r.log_kept})) for r in out]
    assert compare_with_trainer(full) < 5e-5


def test_contexts_beyond_the_servers_are_refused(server, tmp_path):
    with closing(open_loaded(server, tmp_path)) as opened:
        sampling = Sampling(NEW, STOPS, max_turns=2, max_context=CONTEXT + 1)
        with pytest.raises(ConfigError, match=f"Try --set rollout.max_context={CONTEXT + 1}"):
            opened.generate(prompts(1), sampling, seed=0, environment=Replies())
    with pytest.raises(ConfigError, match="is 97.*at most 96 tokens in rollout.max_context"):
        open_engine(server.url, tmp_path, max_context=CONTEXT + 1)


def test_a_prompt_without_room_for_tokens_is_refused(server, tmp_path):
    longest = max(len(p.tokens) for p in prompts(6))
    sampling = Sampling(NEW, STOPS, max_turns=2, max_context=longest)
    with (
        closing(open_loaded(server, tmp_path)) as opened,
        pytest.raises(ConfigError, match=f"Try --set rollout.max_context={2 * longest}"),
    ):
        opened.generate(prompts(6), sampling, seed=0, environment=Replies())


def test_processes_share_episodes_and_run_tools_once(server, tmp_path):
    environments = [Replies() for _ in range(2)]

    def process(channel):
        shared = open_shared(channel, server.url, tmp_path, max_context=CONTEXT)
        with closing(shared) as opened:
            opened.load(weights(0), 3)
            return opened.generate(
                prompts(3), LONG, seed=1, environment=environments[channel.number]
            )

    first, second = as_processes(2, process)
    assert_equal_episodes(first, second)
    assert environments[0].calls and not environments[1].calls
