# SPDX-License-Identifier: Apache-2.0
"""Shared prompts change no number of a step, and no bit in batch-invariant numerics."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import shared_exactness
from bigram import CFG, MODEL, OPS, T, make_batch, start, step_of
from shared_exactness import CASES

from jaxmoe.batches.microbatches import ROWS, map_microbatches
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.config import ConfigError, MeshConfig
from jaxmoe.model.ops import invariant_ops, plain_ops
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.check_rl_step import check_inputs
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained
from pallas_kernels.sink_attention.xla_invariant_blocks import KEYS

SCORER = Scorer(CFG, OPS)
PROGRAM = Path(shared_exactness.__file__)


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
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.slow  # each compiles two steps of a model
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_float64_differs_by_rounding_alone(case):
    assert max(differences(case, "float64")["shared"].values()) <= 1e-12


@pytest.mark.parametrize(
    "sizes, rows, message",
    [
        ({"sequence": 2}, {"length": 2 * T + 1}, r"tokens of a row \(25\).*2 devices of sequence"),
        ({"data": 2, "fsdp": 2}, {"length": 2 * T, "rows": 2}, r"rows of a batch \(2\).*data"),
    ],
)
def test_a_mesh_that_cuts_shared_rows_is_refused(sizes, rows, message):
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
