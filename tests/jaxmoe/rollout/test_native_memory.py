# SPDX-License-Identifier: Apache-2.0
"""The planned cache is the engine's, and samples share a prompt where that is smaller."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe.config_file import load_config, override
from jaxmoe.model import plain_ops
from jaxmoe.model.ops import invariant_ops
from jaxmoe.model.prompt_keys import merges_parts
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.rollout.native_description import open_native
from jaxmoe.rollout.native_memory import plan_native_memory, rows_cache_bytes
from jaxmoe.rollout.native_prompts import shares_prompt_keys
from pallas_kernels import decode_attention
from tests.jaxmoe.random_weights import random_weights


@pytest.mark.parametrize(
    ("prompt", "answer", "samples", "numerics", "shares"),
    [
        (64, 6, 16, "fast", True),
        (64, 512, 8, "fast", False),
        (512, 64, 1, "fast", False),
        (512, 64, 8, "invariant", False),
    ],
)
def test_samples_share_a_prompt_where_that_is_smaller(prompt, answer, samples, numerics, shares):
    cfg = replace(load_config("tiny.py").model, numerics=numerics)
    assert shares_prompt_keys(cfg, prompt, answer, samples, is_episode=False) == shares
    assert not shares_prompt_keys(cfg, prompt, answer, samples, is_episode=True)


@pytest.mark.parametrize(("prompt", "answer"), [(64, 8), (71, 8), (64, 640)])
def test_the_planned_cache_has_the_engines_bytes(prompt, answer):
    cfg = override(
        load_config("tiny.py"),
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={answer}",
        "rollout.samples_per_prompt=4",
    )
    engine = NativeEngine(
        cfg.model, plain_ops(), max_prompt_tokens=prompt, max_new_tokens=answer, max_rows=8
    )
    engine.load(random_weights(cfg.model, 0), 0)
    prompts = [Prompt(i, "", (1,) * prompt, None) for i in range(2)]
    limits = np.full(8, answer, np.int32)
    assert engine._loaded is not None
    state, _ = engine._prefill_batch(
        engine._loaded, prompts, Sampling(answer, ()), 0, 4, 2, 0, limits
    )
    stored = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    assert stored == rows_cache_bytes(cfg, 2, answer)
    assert bool(state.cache.prompts) == (answer == 8)
    # an evaluation has one answer of each of eight prompts
    greedy, _ = engine._prefill_batch(
        engine._loaded, 4 * prompts, Sampling(answer, ()), 0, 1, 8, 0, limits
    )
    stored = sum(x.nbytes for x in jax.tree.leaves(greedy.cache))
    planned = plan_native_memory(override(cfg, "rollout.max_parallel_sequences=8"))
    assert stored == planned.evaluation_cache and planned.cache <= stored


@pytest.mark.parametrize("sync", ["keep", "recompute"])
def test_the_planned_cache_has_all_refilled_rows(sync):
    cfg = override(
        load_config("tiny.py"),
        "rollout.samples_per_prompt=4",
        "rollout.max_parallel_sequences=35",
        "rollout.schedule=groups",
        "rollout.max_staleness=2",
        f"rollout.native.on_weight_sync={sync}",
        "loss.rollout_correction=token_is",
    )
    engine = open_native(cfg, plain_ops(), Path(), None)
    engine.load(random_weights(cfg.model, 0), 0)
    flow = engine.pin()
    flow._size, flow._weights = engine.prompts_per_batch(4) * 4, engine.read_loaded()
    rows = flow._open_batch(np.zeros((1, cfg.model.d_model), np.float32), None).rows
    stored = sum(x.nbytes for x in jax.tree.leaves(rows.cache.stacks))
    planned = plan_native_memory(cfg).cache
    # 32 rows, and 8 of them twice while they are computed.
    assert rows.alive_B.shape == (32,) and abs(planned - stored * 48 / 32) < 64
    assert cfg.rollout.older_versions == 1
    assert override(cfg, "rollout.native.on_weight_sync=admission").rollout.older_versions == 2


def test_only_decode_attention_reads_a_prompt_in_parts():
    """An op of the user's may return no log-sum-exp, and invariant ones need a softmax in one."""
    assert merges_parts(decode_attention)
    assert merges_parts(partial(decode_attention, impl="xla"))
    assert not merges_parts(invariant_ops(plain_ops()).decode)
    assert not merges_parts(lambda *arrays, **options: decode_attention(*arrays, **options))
