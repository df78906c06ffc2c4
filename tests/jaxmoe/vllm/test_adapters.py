# SPDX-License-Identifier: Apache-2.0
"""vLLM samples from adapters over four-bit experts: it is sent whole weights, merged."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from adapted import LORA, adapters_of, base_of
from stand_in import StandIn
from vllm_cases import CFG, NEW, OPS, PROMPT, prompts

from jaxmoe.checkpoint.merge import merged
from jaxmoe.config import VllmConfig
from jaxmoe.model.lora import with_adapters
from jaxmoe.records import Sampling
from jaxmoe.vllm.engine import LOGPS, VllmEngine

PACKABLE = replace(CFG, d_expert=64)


def test_the_weights_that_arrive_are_the_merged_ones_and_log_probs_the_trainers(tmp_path):
    base, adapters = base_of(PACKABLE), adapters_of(PACKABLE)
    whole = merged(base, adapters, LORA.scales, dtype="float32")
    server = StandIn(PACKABLE)
    engine = VllmEngine(
        PACKABLE, OPS, VllmConfig(url=server.url, weights_dir=str(tmp_path / "weights")),
        work=tmp_path, max_prompt_tokens=PROMPT, max_new_tokens=NEW, max_rows=8,
    )  # fmt: skip
    try:
        engine.load(with_adapters(base, adapters, LORA.scales), 1)
        jax.tree.map(np.testing.assert_array_equal, server.params, jax.tree.map(np.asarray, whole))
        (rollout,) = engine.generate(prompts(1), Sampling(NEW, ()), seed=0)
    finally:
        engine.close()
        server.crash()
    ids = jnp.asarray([[*rollout.prompt.tokens, *rollout.tokens.tolist()]])
    start = len(rollout.prompt.tokens)
    ours, unadapted = (
        np.asarray(LOGPS(params, ids, cfg=PACKABLE, ops=OPS))[0, start:]
        for params in (with_adapters(base, adapters, LORA.scales), base)
    )
    np.testing.assert_allclose(rollout.rollout_logp, ours, atol=1e-4)
    assert np.abs(unadapted - ours).max() > 1e-2
