# SPDX-License-Identifier: Apache-2.0
"""Weights change in one thread while another samples: each token carries what it was drawn with."""

import threading
import time

import numpy as np
import pytest
from vllm_cases import NEW, prompts, trainer, weights

from jaxmoe.records import Sampling

FREE = Sampling(NEW, ())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_swap_in_the_middle_of_answers(opened, mode):
    engine = opened(mode)
    engine.load(weights(1), 1)
    engine.generate(prompts(2), FREE, seed=0)  # compiled, warm
    made = []
    for turn in range(3):
        version = 2 + turn
        thread = threading.Thread(
            target=lambda t=turn: made.extend(engine.generate(prompts(6), FREE, seed=t, samples=2))
        )
        thread.start()
        time.sleep(0.03 * (1 + turn))
        engine.load(weights(version), version)
        thread.join()
    assert len(made) == 36 and engine.incidents == []
    mixed = 0
    for r in made:
        versions = r.weight_versions
        assert len(versions) == len(r.tokens) == NEW and (np.diff(versions) >= 0).all()
        mixed += len(set(versions.tolist())) > 1
        for version in set(versions.tolist()):  # the trainer of that version agrees with it
            at = versions == version
            expected = trainer(weights(int(version)), r)[at]
            np.testing.assert_allclose(r.rollout_logp[at], expected, atol=1e-4)
        if r.routed_experts is not None:
            assert len(r.routed_experts) == len(r.prompt.tokens) + NEW - 1
    assert mixed == 0 if mode == "wait" else mixed > 0


def test_an_answer_asked_for_after_a_swap_is_all_of_the_new_weights(opened):
    engine = opened("keep")
    for version in range(1, 6):
        engine.load(weights(version), version)
        for r in engine.generate(prompts(3), Sampling(3, ()), seed=version):
            assert (r.weight_versions == version).all()
