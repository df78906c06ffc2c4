# SPDX-License-Identifier: Apache-2.0
"""The engine's log-probs are those of shared prompts to the bit, after one turn and after several.

Episodes have their prompt in common, and nothing after it: each has replies of its own.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
import pytest

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import jit_step, rl_step
from pallas_kernels.sink_attention.xla_invariant_blocks import KEYS
from tests.jaxmoe.rollout.native_episodes import CFG, INVARIANT, STOPS, open_engine, weights
from tests.jaxmoe.rollout.scripted_environment import ScriptedEnvironment

SAMPLES, LONGEST, NEW, CONTEXT = 4, 2 * KEYS + 3, 24, 130
# two complete blocks, one, and none
PROMPTS = [
    Prompt(i, "", tuple(np.random.default_rng(i).integers(12, 97, length).tolist()), None)
    for i, length in enumerate((LONGEST, KEYS + 9, KEYS - 2))
]
SAMPLING = Sampling(
    max_new_tokens=NEW, stop_ids=STOPS, max_turns=3, max_turn_tokens=8, max_context=CONTEXT
)
TX = optax.sgd(1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_and_engine_agree_over_shared_prompts(dtype):
    cfg = replace(CFG, dtype=dtype, numerics="invariant")
    sizes = dict(max_prompt_tokens=LONGEST, max_new_tokens=NEW, max_context=CONTEXT)
    engine = open_engine(cfg, INVARIANT, max_rows=len(PROMPTS) * SAMPLES, **sizes)
    a, state = Algorithm(), init_state(Trained(weights()), TX)
    options = dict(tx=TX, algorithm=a, scorer=Scorer(cfg, INVARIANT))
    steps = {KEYS: jit_step(**options), 1: jax.jit(partial(rl_step, **options))}
    rewards_B = np.random.default_rng(3).normal(size=len(PROMPTS) * SAMPLES)
    row = 2 * KEYS + SAMPLES * (CONTEXT - 2 * KEYS)

    def measure(batch, unit):
        sharing = PromptSharing(row, unit=unit)
        shared, _ = split_minibatches(batch, a, seed=(0,), sharing=sharing)
        assert shared.packing.shared.is_stored_B.tolist()[: 2 * SAMPLES] == [
            *(True, *[False] * (SAMPLES - 1)) * 2
        ]
        _, metrics, _ = steps[unit](state, shared)
        assert metrics["grad/norm"] > 0
        return float(metrics["train_rollout_logprob_abs_diff_max"])

    for environment in (None, ScriptedEnvironment(97, turns=3, longest=12)):
        rollouts = engine.generate(
            PROMPTS, SAMPLING, seed=4, samples=SAMPLES, environment=environment
        )
        has_replies = any(not r.sampled_mask.all() for r in rollouts)
        assert has_replies == (environment is not None)
        batch = rollout_batch(rollouts, rewards_B, samples=SAMPLES, length=CONTEXT, pad_id=0)
        assert measure(batch, KEYS) == 0.0
        # tokens that are no complete blocks are summed in another order: jit_step refuses them
        assert measure(batch, 1) > 0.0 or dtype == "bfloat16"
