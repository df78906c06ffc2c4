# SPDX-License-Identifier: Apache-2.0
"""Batches sampled by vLLM during weight syncs: whole, in order, of known versions."""

import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from vllm_cases import NEW, prompts, trainer, weights

from jaxmoe.records import Sampling
from jaxmoe.rollout.async_rollouts import AsyncRollouts
from jaxmoe.rollout.group_flow import GroupFlow, GroupRollouts
from jaxmoe.rollout.group_order import GroupOrder
from jaxmoe.rollout.staleness import check_versions

FREE = Sampling(NEW, ())
LAST, MAX_STALENESS, PROMPTS_PER_STEP = 6, 2, 4


OPTIONS = dict(first=1, last=LAST, stop=lambda: False)


def open_batches(engine):
    def make(step):
        return engine.generate(
            prompts(PROMPTS_PER_STEP, PROMPTS_PER_STEP * step), FREE, seed=step, samples=2
        )

    return AsyncRollouts(make, max_staleness=MAX_STALENESS, interrupt=engine.close, **OPTIONS)


def open_groups(engine):
    def admit(number):
        prompt = prompts(1, PROMPTS_PER_STEP + number)
        return partial(engine.generate, prompt, FREE, seed=number, samples=2)

    flow = GroupFlow(
        admit,
        GroupOrder(PROMPTS_PER_STEP, 0),
        places=6,
        ahead=MAX_STALENESS,
        last=LAST,
        step=0,
    )

    def make(step):
        return [rollout for group in flow.draw(step)[0].values() for rollout in group]

    return GroupRollouts(
        make,
        flow,
        ahead=MAX_STALENESS,
        save=lambda step: ({}, b""),
        interrupt=engine.close,
        **OPTIONS,
    )


@pytest.mark.parametrize("open_rollouts", [open_batches, open_groups])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_async_tokens_are_of_their_labelled_versions(opened, mode, open_rollouts):
    engine = opened(mode)
    batches = open_rollouts(engine)
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
