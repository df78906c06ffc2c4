# SPDX-License-Identifier: Apache-2.0
"""Batches sampled by vLLM during weight syncs: whole, in order, of known versions."""

import time
from contextlib import closing

import numpy as np
import pytest
from vllm_cases import NEW, prompts, trainer, weights

from jaxmoe.records import Sampling
from jaxmoe.rollout.async_rollouts import AsyncRollouts
from jaxmoe.rollout.staleness import check_versions

FREE = Sampling(NEW, ())
LAST, MAX_STALENESS, PROMPTS_PER_STEP = 6, 2, 4


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_async_tokens_are_of_their_labelled_versions(opened, mode):
    engine = opened(mode)

    def make(step):
        return engine.generate(
            prompts(PROMPTS_PER_STEP, PROMPTS_PER_STEP * step), FREE, seed=step, samples=2
        )

    batches = AsyncRollouts(
        make,
        first=1,
        last=LAST,
        max_staleness=MAX_STALENESS,
        stop=lambda: False,
        interrupt=engine.close,
    )
    ages = []
    with closing(batches):
        engine.load(weights(0), 0)
        batches.weights_synced(0)
        for step in range(1, LAST + 1):
            batch = batches.take_batch(step)
            assert batch is not None
            numbers = range(PROMPTS_PER_STEP * step, PROMPTS_PER_STEP * (step + 1))
            assert [r.prompt.id for r in batch] == [i for i in numbers for _ in range(2)]
            ages.append(check_versions(batch, newest=step - 1, max_staleness=MAX_STALENESS))
            for r in batch:
                assert len(r.tokens) == NEW
                for version in np.unique(r.weight_versions):
                    of_version = r.weight_versions == version
                    expected = trainer(weights(int(version)), r)[of_version]
                    np.testing.assert_allclose(r.rollout_logp[of_version], expected, atol=1e-4)
            time.sleep(0.03)  # into the next batch
            engine.load(weights(step), step)
            batches.weights_synced(step)
    assert engine.incidents == []
    assert max(a["staleness/max"] for a in ages) >= 1
    if mode == "wait":
        assert all(a["staleness/mixed_frac"] == 0.0 for a in ages)
