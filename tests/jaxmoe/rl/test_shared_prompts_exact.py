# SPDX-License-Identifier: Apache-2.0
"""Shared prompts change no number of a step, and no bit in batch-invariant numerics."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import shared_exactness
from bigram import CFG, EPS, MODEL, OPS, T, make_batch, start, step_of
from shared_exactness import CASES

from jaxmoe.config import ConfigError, MeshConfig
from jaxmoe.losses import gae
from jaxmoe.model import init_params
from jaxmoe.model.ops import invariant_ops, plain_ops
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh, state_shardings
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import shard_rows
from jaxmoe.rl.check_rl_step import check_inputs
from jaxmoe.rl.microbatches import ROWS, map_microbatches
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.shared_prompts import PromptSharing
from jaxmoe.rl.state import Trained
from jaxmoe.rl.terms import value_term
from pallas_kernels.sink_attention.xla_invariant_blocks import KEYS

SCORER = Scorer(CFG, OPS)
PROGRAM = Path(shared_exactness.__file__)
T_EXACT = shared_exactness.PROMPT + shared_exactness.ANSWER


def share(batch, **fields):
    a = Algorithm()
    return split_minibatches(batch, a, seed=(0,), sharing=PromptSharing(**fields))[0]


@jax.jit
def score(batch):
    """What a step reads of each token."""

    def read(part):
        out = SCORER.score_policy(Trained(MODEL), part)
        return {name: out[name] for name in ("logp_BT", "entropy_BT", "experts_BTLA")}

    return map_microbatches(read, batch, 1, ROWS)


def test_shared_rows_have_the_outputs_of_separate_rows():
    """Two rows of 24 tokens: groups are cut, and parts of two groups share a row."""
    batch = make_batch()
    shared = share(batch, length=2 * T, rows=2)
    assert not shared.packing.shared.is_stored_B.all() and int(shared.packing.count) == 2
    actual, want, mask = score(shared), score(batch), batch.loss_mask_BT
    for name in ("logp_BT", "entropy_BT"):
        np.testing.assert_allclose(actual[name][mask], want[name][mask], rtol=1e-5, atol=1e-5)
    # of prompts too, which terms of the router read
    is_token = batch.segment_ids_BT > 0
    np.testing.assert_array_equal(actual["experts_BTLA"][is_token], want["experts_BTLA"][is_token])


def differences(case, dtype):
    command = [sys.executable, str(PROGRAM), case, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_exact_cases_have_replies_and_an_untrained_row(case):
    case = CASES[case]
    batch = shared_exactness.make_batch(case, shared_exactness.make_config(case))
    mask_BT = batch.loss_mask_BT
    first_B, last_B = mask_BT.argmax(axis=1), T_EXACT - 1 - mask_BT[:, ::-1].argmax(axis=1)
    has_replies_B = mask_BT.sum(axis=1) < last_B - first_B + 1
    is_trained_B = mask_BT.any(axis=1)
    assert has_replies_B.sum() > 1 and list(is_trained_B) == [i != 1 for i in range(len(mask_BT))]
    shared = share(batch, length=case.length, rows=case.rows).packing.shared
    assert (has_replies_B & (shared.length_B > 0) & ~shared.is_stored_B).any()
    assert shared.length_B[1] == 0 < shared.length_B[0]


@pytest.mark.slow  # each compiles two steps of a model
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_float64_differs_by_rounding_alone(case):
    assert max(differences(case, "float64")["shared"].values()) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["grpo, split groups", "gspo, kl in the loss", "ppo, shared critic", "r3"]
)
def test_float32_differs_no_more_than_packed_rows(case):
    found = differences(case, "float32")
    for name, difference in found["shared"].items():
        assert difference <= 4 * max(found["packed"][name], 4 * EPS), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_blocks_give_the_bits_of_own_rows(dtype):
    """A step with batch-invariant numerics: its log-probs are those of rows without sharing."""
    case = CASES["grpo, split groups"]
    cfg = replace(shared_exactness.make_config(case), dtype=dtype)
    rng, batch = np.random.default_rng(0), shared_exactness.make_batch(case, CFG)
    longer = rng.integers(0, cfg.vocab_size, (1, 2 * KEYS + 3)).astype(np.int32)

    def lengthen(x, first):
        return np.concatenate([np.broadcast_to(first, (len(x), longer.shape[1])), x], axis=1)

    segments = lengthen(batch.segment_ids_BT, np.int32(1))
    batch = replace(
        batch,
        tokens_BT=lengthen(batch.tokens_BT, longer),
        segment_ids_BT=segments,
        positions_BT=np.broadcast_to(np.arange(segments.shape[1], dtype=np.int32), segments.shape),
        loss_mask_BT=lengthen(batch.loss_mask_BT, False),
    )
    scorer = Scorer(cfg, invariant_ops(plain_ops()))
    params = Trained(shared_exactness.init_weights(cfg))

    @jax.jit
    def score(batch):
        return map_microbatches(
            lambda part: scorer.score_policy(params, part)["logp_BT"], batch, 1, ROWS
        )

    mask, want = batch.loss_mask_BT, score(batch)
    for unit, equal in ((KEYS, True), (1, False)):
        shared = share(batch, length=300, unit=unit)
        assert not shared.packing.shared.is_stored_B.all()
        same = np.asarray(score(shared))[mask] == np.asarray(want)[mask]
        assert same.all() == equal or (not equal and dtype == "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2},
        {"fsdp": 2},
        {"tensor": 3},
        {"sequence": 2},
        {"sequence": 2, "attention": "zigzag"},
        {"sequence": 2, "attention": "ulysses"},
    ],
    ids=lambda sizes: "_".join(f"{name}_{x}" for name, x in sizes.items()),
)
def test_rows_of_shared_prompts_may_be_on_several_devices(sizes):
    a = Algorithm(advantages=partial(gae, trace=0.9), critic="shared", terms=(value_term(),))
    cfg = replace(CFG, n_experts=6, vocab_multiple=8)
    params = init_params(jax.random.key(0), cfg)
    mesh_cfg = MeshConfig(**sizes)
    mesh = make_mesh(mesh_cfg)
    batch, state = share(make_batch(), length=2 * T, rows=2), start(a, params=params)
    want, _ = step_of(a, scorer=Scorer(cfg, OPS, critic="shared"))(state, make_batch())
    ops = sharded_ops(plain_ops(), mesh, cfg, method=mesh_cfg.attention)
    scorer = Scorer(cfg, ops, critic="shared")
    placed = jax.device_put(state, state_shardings(state, cfg, mesh))
    actual, _ = step_of(a, scorer=scorer)(placed, shard_rows(batch, mesh))
    for x, y in zip(jax.tree.leaves(actual.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sizes, rows, message",
    [
        ({"sequence": 2}, {"length": 2 * T + 1}, r"tokens of a row \(25\).*2 devices of sequence"),
        ({"data": 2, "fsdp": 2}, {"length": 2 * T, "rows": 2}, r"rows of a batch \(2\).*data"),
    ],
)
def test_a_mesh_that_cuts_shared_rows_is_one_line(sizes, rows, message):
    scorer = Scorer(CFG, sharded_ops(plain_ops(), make_mesh(MeshConfig(**sizes)), CFG))
    batch = share(make_batch(), **rows)

    def score(batch):
        return map_microbatches(
            lambda part: scorer.score_policy(Trained(MODEL), part)["logp_BT"], batch, 1, ROWS
        )

    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(score, batch)
    assert "\n" not in str(error.value) and "PromptSharing(" in str(error.value)


def test_invariant_steps_refuse_prompts_not_shared_in_blocks():
    a, batch = Algorithm(), make_batch()
    state = start(a, params=MODEL)
    plain, invariant = (Scorer(CFG, ops) for ops in (OPS, invariant_ops(OPS)))
    for unit, scorer in ((1, plain), (KEYS, invariant), (2 * KEYS, invariant)):
        check_inputs(state, share(batch, length=2 * T, unit=unit), None, a, scorer, 1)
    with pytest.raises(ConfigError, match=r"unit=1\)\. Try PromptSharing\(unit=32\)\."):
        jax.eval_shape(step_of(a, scorer=invariant), state, share(batch, length=2 * T))
