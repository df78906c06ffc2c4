# SPDX-License-Identifier: Apache-2.0
"""Rollouts as bytes and back."""

from dataclasses import fields, replace

import numpy as np

from jaxmoe.http_engine import packed_rollouts
from jaxmoe.http_engine.packed_rollouts import deserialize_rollouts, serialize_rollouts
from jaxmoe.records import Prompt, Rollout, StopReason


def rollout(prompt, length, stop, log_kept, experts):
    rng = np.random.default_rng(length)
    shape = (len(prompt.tokens) + length - 1, 2, 3)
    return Rollout(
        prompt,
        rng.integers(0, 99, length).astype(np.int32),
        rng.normal(size=length).astype(np.float32),
        stop,
        np.full(length, 7, np.int32),
        rng.normal(size=length).astype(np.float32) if log_kept else None,
        rng.integers(0, 9, shape).astype(np.uint8) if experts else None,
    )


def test_packed_arrays_have_their_dtype_and_prompts_once():
    first, second = Prompt(3, "ä?", (1, 2, 3), "4"), Prompt(5, "", (9,), None)
    rollouts = [
        rollout(first, 4, StopReason.STOP_TOKEN, True, True),
        rollout(first, 1, StopReason.MAX_TOKENS, False, True),
        rollout(second, 6, StopReason.MAX_TOKENS, True, False),
    ]
    restored, extra = deserialize_rollouts(serialize_rollouts(rollouts, incidents=["a"]))
    assert extra == {"incidents": ["a"]} and restored[0].prompt is restored[1].prompt
    for a, b in zip(rollouts, restored, strict=True):
        assert (a.prompt, a.stop) == (b.prompt, b.stop)
        for name in ("tokens", "rollout_logp", "weight_versions", "log_kept", "routed_experts"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None)
            if x is not None:
                assert x.dtype == y.dtype and np.array_equal(x, y), name


def test_nothing_comes_back_as_nothing():
    assert deserialize_rollouts(serialize_rollouts([])) == ([], {})


def test_masks_and_numbers_of_an_environment_come_back():
    prompt = Prompt(3, "", (1, 2), None)
    plain = rollout(prompt, 4, StopReason.MAX_TURNS, True, True)
    episode = replace(
        plain,
        policy_mask=np.array([True, False, False, True]),
        env_rewards={"format": 0.5},
        env_metrics={"tool/calls": 2.0},
        lost="env_error",
        env_fault="ValueError: x",
    )
    restored, _ = deserialize_rollouts(serialize_rollouts([episode, plain]))
    assert restored[0].policy_mask.tolist() == [True, False, False, True]
    assert restored[0].policy_mask.dtype == bool and restored[0].stop is StopReason.MAX_TURNS
    assert restored[0].env_rewards == {"format": 0.5}
    assert restored[0].env_metrics == {"tool/calls": 2.0}
    assert [(r.lost, r.env_fault) for r in restored] == [("env_error", "ValueError: x"), ("", "")]
    # A field that another process does not get would be its default there.
    packed = {
        *packed_rollouts._ARRAYS,
        *packed_rollouts._NUMBERS,
        *packed_rollouts._PLAIN,
        "prompt",
        "stop",
    }
    assert packed == {field.name for field in fields(Rollout)}
    assert restored[1].policy_mask is None and restored[1].env_metrics == {}
