# SPDX-License-Identifier: Apache-2.0
"""Rollouts as bytes and back."""

import numpy as np

from jaxmoe.records import Prompt, Rollout, StopReason
from jaxmoe.rollout.packed_rollouts import deserialize_rollouts, serialize_rollouts


def rollout(prompt, length, stop, kept, experts):
    rng = np.random.default_rng(length)
    shape = (len(prompt.tokens) + length - 1, 2, 3)
    return Rollout(
        prompt, rng.integers(0, 99, length).astype(np.int32),
        rng.normal(size=length).astype(np.float32), stop, np.full(length, 7, np.int32),
        rng.normal(size=length).astype(np.float32) if kept else None,
        rng.integers(0, 9, shape).astype(np.uint8) if experts else None,
    )  # fmt: skip


def test_every_array_comes_back_with_its_dtype_and_prompts_once():
    one, other = Prompt(3, "ä?", (1, 2, 3), "4"), Prompt(5, "", (9,), None)
    made = [
        rollout(one, 4, StopReason.STOP_TOKEN, True, True),
        rollout(one, 1, StopReason.MAX_TOKENS, False, True),
        rollout(other, 6, StopReason.MAX_TOKENS, True, False),
    ]
    back, told = deserialize_rollouts(serialize_rollouts(made, incidents=["a"]))
    assert told == {"incidents": ["a"]} and back[0].prompt is back[1].prompt
    for a, b in zip(made, back, strict=True):
        assert (a.prompt, a.stop) == (b.prompt, b.stop)
        for name in ("tokens", "rollout_logp", "weight_versions", "log_kept", "routed_experts"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None)
            if x is not None:
                assert x.dtype == y.dtype and np.array_equal(x, y), name


def test_nothing_comes_back_as_nothing():
    assert deserialize_rollouts(serialize_rollouts([])) == ([], {})
