# SPDX-License-Identifier: Apache-2.0
"""One small model, its weights and prompts, and engines over it."""

import os
import sys
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import VllmConfig
from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.model import abstract_params, plain_ops
from jaxmoe.records import Prompt
from jaxmoe.vllm.engine.multi_process_engine import MultiProcessVllmEngine
from jaxmoe.vllm.engine.vllm_engine import VllmEngine
from tests.jaxmoe.small_models import SIX_EXPERTS

# what vLLM takes on a CPU: widths of whole 32s
OPS = plain_ops()
CFG = SIX_EXPERTS
PROMPT, NEW, ROWS = 20, 13, 32
PYTHON = os.environ.get("JAXMOE_VLLM_PYTHON", sys.executable)


@cache
def weights(seed):
    """Random weights, different enough that no two versions agree; made without a compiler."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = str(path[-1].key)
        if "norm" in name:
            return jnp.asarray(1 + 0.1 * rng.normal(size=x.shape), jnp.float32)
        scale = 1.0 if name == "embed" else 0.1 if x.ndim < 3 else x.shape[-2] ** -0.5
        return jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(CFG))


PADDED = 39  # as long as the engine's own probe of the stand-in: one program for both


def trainer(params, rollout):
    """The trainer's log-probs of a rollout's tokens."""
    ids = [*rollout.prompt.tokens, *rollout.tokens.tolist()]
    padded = np.zeros((1, PADDED), np.int32)
    padded[0, : len(ids)] = ids
    logp_BT = TRAINER_LOGPS(params, jnp.asarray(padded), cfg=CFG, ops=OPS)
    return np.asarray(logp_BT)[0, len(rollout.prompt.tokens) : len(ids)]


def prompts(count, first=0):
    generated = []
    for i in range(first, first + count):
        rng = np.random.default_rng(i)
        tokens = rng.integers(0, CFG.vocab_size, int(rng.integers(2, PROMPT + 1)))
        generated.append(Prompt(i, "", tuple(tokens.tolist()), None))
    return generated


def check_rollouts(out, requested, samples, version, params=None):
    """Assert that no rollout is lost or duplicated, and that every token is of this version."""
    assert [r.prompt.id for r in out] == [p.id for p in requested for _ in range(samples)]
    assert len({(r.prompt.id, r.tokens.tobytes()) for r in out}) == len(out)
    params = weights(version) if params is None else params
    for r in out:
        assert (r.weight_versions == version).all()
        np.testing.assert_allclose(r.rollout_logp, trainer(params, r), atol=5e-5)


def open_engine(
    url, work, *, cfg=CFG, max_rows=ROWS, max_context=0, make=VllmEngine, given=None, **changes
):
    """An engine over servers or its own; `given` are further arguments of the engine's class."""
    options: dict[str, Any] = dict(
        url=url, weights_dir=str(work / "weights"), request_timeout_s=20.0, python=PYTHON
    )
    return make(
        cfg,
        OPS,
        VllmConfig(**(options | changes)),
        work=work,
        max_prompt_tokens=PROMPT,
        max_new_tokens=NEW,
        max_rows=max_rows,
        max_context=max_context,
        **given or {},
    )


def open_shared(channel, url, work, **changes):
    """One process's part of an engine that several processes share."""
    make: Any = partial(MultiProcessVllmEngine, mesh=None, channel=channel)
    return open_engine(url, work, make=make, **changes)
