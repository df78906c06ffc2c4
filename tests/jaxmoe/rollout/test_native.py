# SPDX-License-Identifier: Apache-2.0
"""The engine: reproducible, blind to companions, and in agreement with the trainer."""

from dataclasses import replace
from functools import partial
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.config import ConfigError, EngineError, MeshConfig
from jaxmoe.model import abstract_params, forward, plain_ops
from jaxmoe.parallel.sharding import make_mesh, param_shardings
from jaxmoe.records import Prompt, Sampling, StopReason
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained
from jaxmoe.rollout.native import NativeEngine
from tests.jaxmoe.random_weights import noisy_params
from tests.jaxmoe.rollout.native_episodes import CFG

OPS = plain_ops()
NEW = 21
EPS = float(np.finfo(np.float32).eps)
STOPS = tuple(range(5, 19))  # likely enough that rows stop early and are dropped


def prompt(i, length):
    tokens = np.random.default_rng(i).integers(12, 97, length).tolist()
    return Prompt(i, "", tuple(tokens), None)


PROMPTS = [prompt(i, 3 + 4 * i) for i in range(5)]
FREE = Sampling(max_new_tokens=NEW, stop_ids=())
STOPPING = Sampling(max_new_tokens=NEW, stop_ids=STOPS)


@jax.jit
def weights():
    return noisy_params(CFG)


@pytest.fixture(scope="module")
def engine():
    native = NativeEngine(CFG, OPS, max_prompt_tokens=20, max_new_tokens=NEW, max_rows=40)
    native.load(weights(), 3)
    return native


@pytest.fixture(scope="module")
def cutting():
    """An engine of its own for top-k and top-p, which compile their own programs."""
    native = NativeEngine(CFG, OPS, max_prompt_tokens=20, max_new_tokens=NEW, max_rows=20)
    native.load(weights(), 3)
    return native


@partial(jax.jit, static_argnames="temperature")
def score(params, batch, temperature):
    return Scorer(CFG, OPS, temperature).score_policy(Trained(params), batch)["logp_BT"]


@pytest.mark.slow  # compiles for four devices
def test_a_mesh_draws_equal_tokens_and_log_probs(engine):
    mesh = make_mesh(MeshConfig(fsdp=2, sequence=2), jax.devices()[:4])
    cut = NativeEngine(
        CFG, OPS, max_prompt_tokens=20, max_new_tokens=NEW, max_rows=12, mesh=mesh
    )  # in waves: 5 prompts, 4 at a time, a row of prompts on each device
    assert mesh is not None
    cut.load(jax.device_put(weights(), param_shardings(CFG, mesh)), 3)
    engine_logp = cut.generate(PROMPTS, STOPPING, seed=7, samples=8)
    expected = engine.generate(PROMPTS, STOPPING, seed=7, samples=8)
    assert assert_same(engine_logp, expected)
    for a, b in zip(engine_logp, expected, strict=True):
        np.testing.assert_allclose(a.rollout_logp, b.rollout_logp, atol=64 * EPS)
    assert cut.count_compilations() == 3
    assert cut._loaded is not None
    limits = np.full(32, NEW, np.int32)
    state, _ = cut._prefill_batch(cut._loaded, PROMPTS[:4], STOPPING, 7, 8, 4, 0, limits)
    stacks = *state.cache.stacks.values(), state.cache.prompts["full"].stack
    for x in (stack.k for stack in stacks):
        assert x.addressable_shards[0].data.shape[1] == x.shape[1] // 4


def assert_same(a, b):
    return all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))


def test_equal_seeds_give_equal_tokens(engine):
    a, b, c = (engine.generate(PROMPTS, FREE, seed=s, samples=8) for s in (1, 1, 2))
    assert assert_same(a, b)
    assert all(np.array_equal(x.rollout_logp, y.rollout_logp) for x, y in zip(a, b, strict=True))
    assert not assert_same(a, c)
    assert len({tuple(r.tokens.tolist()) for r in a}) == 40
    assert [r.prompt.id for r in a] == np.repeat(range(5), 8).tolist()


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_companions(engine):
    a = engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
    neighbours = [PROMPTS[0], prompt(50, 20), PROMPTS[2], prompt(51, 2), prompt(52, 9)]
    b = engine.generate(neighbours, STOPPING, seed=1, samples=8)
    assert assert_same(a[:8], b[:8]) and assert_same(a[16:24], b[16:24])
    assert not assert_same(a[8:16], b[8:16])


def test_a_rows_place_matters_only_through_its_stream(engine):
    greedy = Sampling(max_new_tokens=NEW, stop_ids=STOPS, temperature=0.0)
    a = engine.generate(PROMPTS, greedy, seed=1, samples=8)[::8]
    b = engine.generate(PROMPTS[::-1], greedy, seed=2, samples=8)[::-8]
    assert assert_same(a, b)


def test_weights_loaded_while_sampling_are_the_next_calls(engine):
    new_weights = jax.tree.map(lambda x: 0.5 * x, weights())
    before = engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
    programs = engine._programs

    def loads_first(*args, **named):
        engine._programs = programs
        engine.load(new_weights, 4)
        return programs.decode(*args, **named)

    try:
        engine._programs = replace(programs, decode=loads_first)
        meanwhile = engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
        assert assert_same(before, meanwhile)
        assert all((r.weight_versions == 3).all() for r in meanwhile)
        second = engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
        assert not assert_same(before, second) and all(
            (r.weight_versions == 4).all() for r in second
        )
    finally:
        engine._programs = programs
        engine.load(weights(), 3)


def test_close_ends_the_sampling_of_another_thread(engine):
    programs = engine._programs

    def closes_first(*args, **named):
        engine._programs = programs
        engine.close()
        return programs.decode(*args, **named)

    try:
        engine._programs = replace(programs, decode=closes_first)
        with pytest.raises(EngineError, match="closed while it sampled"):
            engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
    finally:
        engine._programs, engine._closed = programs, Event()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_trainer(engine, temperature):
    """Rows stop at different steps here, so finished rows were dropped on the way."""
    sampling = Sampling(NEW, STOPS, temperature=temperature)
    out = engine.generate(PROMPTS, sampling, seed=1, samples=8)
    engine_logp, trainer = engine_and_trainer(out, temperature, samples=8)
    np.testing.assert_allclose(engine_logp, trainer, rtol=0, atol=1e-5 / temperature)
    assert len({len(r.tokens) for r in out}) > 4
    assert all(r.weight_versions.tolist() == [3] * len(r.tokens) for r in out)


def engine_and_trainer(out, temperature, samples=4):
    """Log-probs of every answer's token as the training batch has them, and as the trainer does."""
    batch = rollout_batch(out, np.zeros(len(out)), samples=samples, length=20 + NEW, pad_id=0)
    trainer_BT = score(weights(), batch, temperature=temperature)
    return batch.rollout_logp_BT[batch.loss_mask_BT], np.asarray(trainer_BT)[batch.loss_mask_BT]


@pytest.mark.parametrize(
    "cut", [pytest.param({"top_k": 7}, marks=pytest.mark.slow), {"top_p": 0.6, "temperature": 0.7}]
)
def test_with_kept_mass_log_probs_are_untruncated(engine, cutting, cut):
    """Rows stop at different steps here, so finished rows were dropped on the way."""
    temperature = cut.get("temperature", 1.0)
    untruncated = engine.generate(PROMPTS, Sampling(NEW, STOPS, temperature), seed=1, samples=8)
    engine_logp, trainer = engine_and_trainer(untruncated[:20], temperature)
    floor = np.max(np.abs(engine_logp - trainer))  # decoding against the trainer, nothing cut off
    out = cutting.generate(PROMPTS, Sampling(NEW, STOPS, **cut), seed=1, samples=4)
    engine_logp, trainer = engine_and_trainer(out, temperature)
    bound = 2 * floor + 4 * EPS * np.max(np.abs(trainer))
    assert np.max(np.abs(engine_logp - trainer)) <= bound
    rollout_logp = np.concatenate([r.rollout_logp for r in out])
    assert (
        np.mean(rollout_logp - trainer) > 1e4 * bound and np.min(rollout_logp - trainer) >= -bound
    )
    log_kept = np.concatenate([r.log_kept for r in out])
    assert log_kept.dtype == np.float32 and log_kept.max() <= 0.0
    assert np.exp(log_kept.min()) >= cut.get("top_p", 7 / 97) * (1 - 8 * EPS)
    assert all(len(r.log_kept) == len(r.tokens) for r in out)
    assert len({len(r.tokens) for r in out}) > 4


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 3}])
def test_without_truncation_no_mass_is_reported(engine, cut):
    out = engine.generate(PROMPTS, Sampling(NEW, (), **cut), seed=1, samples=8)
    assert all(r.log_kept is None for r in out)


def test_greedy_log_probs_ignore_top_k_and_p(engine):
    untruncated = engine.generate(PROMPTS, Sampling(NEW, (), temperature=0.0), seed=1, samples=8)
    cut = Sampling(NEW, (), temperature=0.0, top_k=3, top_p=0.5)
    for a, b in zip(untruncated, engine.generate(PROMPTS, cut, seed=1, samples=8), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)


def test_stop_tokens_and_the_budget_end_rows(engine):
    out = engine.generate(PROMPTS, STOPPING, seed=4, samples=8)
    for r in out:
        assert not np.isin(r.tokens[:-1], STOPS).any()
        assert len(r.rollout_logp) == len(r.tokens)
        if r.stop is StopReason.STOP_TOKEN:
            assert r.tokens[-1] in STOPS
        else:
            assert len(r.tokens) == NEW and r.tokens[-1] not in STOPS
    assert {r.stop for r in out} == {StopReason.STOP_TOKEN, StopReason.MAX_TOKENS}


def test_dropping_finished_rows_changes_no_token(engine, monkeypatch):
    shrinking = engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
    sizes = []
    programs = engine._programs

    def select(rows, keep):
        sizes.append(len(keep))
        return programs.select(rows, keep)

    monkeypatch.setattr(engine, "_programs", replace(programs, select=select))
    engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
    assert sizes and sizes == sorted(sizes, reverse=True) and sizes[-1] < 40
    free = engine.generate(PROMPTS, FREE, seed=1, samples=8)
    for cut, untruncated in zip(shrinking, free, strict=True):
        np.testing.assert_array_equal(cut.tokens, untruncated.tokens[: len(cut.tokens)])


def test_calls_of_any_prompt_length_compile_nothing_new(engine):
    for sampling in (FREE, STOPPING):
        engine.generate(PROMPTS, sampling, seed=0, samples=8)
    first = engine.count_compilations()
    for seed in range(1, 8):
        prompts = [prompt(seed * 10 + i, 1 + (3 * seed + i) % 20) for i in range(1 + seed % 5)]
        engine.generate(prompts, STOPPING, seed=seed, samples=8)
    # one prefill, one repeat, a decode and a compaction for each size 40 -> 10 -> 8; and a
    # decode of each size again for another number of stop tokens
    assert first == engine.count_compilations() <= 10


def test_no_probability_goes_to_the_padded_vocabulary(engine):
    hot = Sampling(max_new_tokens=NEW, stop_ids=(), temperature=50.0)
    out = engine.generate(PROMPTS, hot, seed=1, samples=8)
    drawn = np.concatenate([r.tokens for r in out])
    assert drawn.max() < 97 and len(np.unique(drawn)) > 90


def test_temperature_0_takes_the_likeliest_token(engine):
    greedy = Sampling(max_new_tokens=NEW, stop_ids=(), temperature=0.0)
    out = engine.generate(PROMPTS, greedy, seed=0, samples=8)[8]
    ids = [*PROMPTS[1].tokens, *out.tokens.tolist()]
    params = weights()
    hidden = jax.jit(lambda p, t: forward(p, t, CFG, OPS)[0])(params, jnp.asarray([ids]))
    logits = hidden[0] @ params["head"][:, :97]
    n = len(PROMPTS[1].tokens)
    np.testing.assert_array_equal(jnp.argmax(logits, axis=1)[n - 1 : -1], out.tokens)


def test_the_engine_copies_weights_that_the_trainer_donates():
    native = NativeEngine(CFG, OPS, max_prompt_tokens=20, max_new_tokens=5, max_rows=8)
    params = weights()
    native.load(params, 1)
    jax.tree.map(lambda x: x.delete(), params)
    assert len(native.generate(PROMPTS[:1], Sampling(5, ()), seed=0)[0].tokens) == 5


def test_too_long_inputs_are_refused_with_the_setting(engine):
    with pytest.raises(ConfigError, match="max_prompt_tokens=40"):
        engine.generate([prompt(1, 40)], FREE, seed=0)
    with pytest.raises(ConfigError, match="rollout.max_new_tokens=22"):
        engine.generate(PROMPTS, Sampling(22, ()), seed=0)
    bare = NativeEngine(CFG, OPS, max_prompt_tokens=20, max_new_tokens=5, max_rows=8)
    with pytest.raises(ValueError, match="load"):
        bare.generate(PROMPTS, Sampling(5, ()), seed=0)


def test_precompiled_programs_are_those_of_a_wave(engine, monkeypatch):
    def shapes(args, static):
        static = {name: value for name, value in static.items() if name != "enough"}
        return jax.tree.map(lambda x: (np.shape(x), str(x.dtype)), args), static

    class Made:
        """As a compiled program, of which results' shapes alone are asked."""

        def __init__(self, jitted, *args, **static):
            ahead.append(shapes(args, static))
            self.out_info = jax.eval_shape(partial(jitted, **static), *args)
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            self.output_shardings = jax.tree.map(lambda _: sharding, self.out_info)

    def recorded(jitted, *args, **static):
        ran.append(shapes(args, static))
        return jitted(*args, **static)

    ahead, ran = [], []
    engine.compile_programs(Made, STOPPING, abstract_params(CFG), samples=8)
    for name in ("_prefill", "_share"):
        monkeypatch.setattr(engine, name, partial(recorded, getattr(engine, name)))
    programs = engine._programs
    monkeypatch.setattr(
        engine, "_programs", replace(programs, decode=partial(recorded, programs.decode))
    )
    engine.generate(PROMPTS, STOPPING, seed=1, samples=8)
    assert ahead == ran[:3]
    assert engine.prompts_per_batch(8) == 5
