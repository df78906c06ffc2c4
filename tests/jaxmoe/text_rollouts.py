# SPDX-License-Identifier: Apache-2.0
"""Rollouts with answers that a test writes."""

import numpy as np

from jaxmoe.records import Rollout, StopReason


def make_rollouts(task, answer, samples=2, count=8, first=0):
    """Rollouts of the prompts from the first; answer: from the row and the number of the sample."""
    rollouts = []
    for i in range(first, first + count):
        prompt = task.make_prompt(task.train, i)
        for sample in range(samples):
            ids = [*task.tokenizer.encode(answer(task.train[i], sample)), task.sampling.stop_ids[0]]
            tokens = np.array(ids, np.int32)
            rollouts.append(
                Rollout(
                    prompt, tokens, np.zeros(len(ids), np.float32), StopReason.STOP_TOKEN, tokens
                )
            )
    return rollouts
