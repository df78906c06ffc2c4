# SPDX-License-Identifier: Apache-2.0
"""RL's step from Python: arrays that do not fit are refused by name; groups come with the batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, MODEL, OPS, PARAMS, SGD, B, Bigram, T, make_batch, start, step_of

from jaxmoe.config import ConfigError
from jaxmoe.losses import gae
from jaxmoe.model import init_params
from jaxmoe.model.params import check_param_shapes
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import Minibatches, split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.terms import kl_term, value_term

BATCH = make_batch()
MINI = Algorithm(old_logp="recomputed", minibatches=2)


def custom_objective(logp_BT, advantages_BT, mask_BT):
    return -jnp.where(mask_BT, logp_BT, 0.0) * advantages_BT


GRPO = Algorithm()
WITH_KL = Algorithm(terms=(kl_term(0.1),))
PPO = Algorithm(advantages=gae, critic="own", terms=(value_term(),))


def step(batch, a=GRPO, state=None, scorer=None, minibatches=None, **options):
    scorer, state = scorer or Bigram(CFG, OPS), state or start(Algorithm())
    return step_of(a, scorer=scorer, **options)(state, batch, minibatches)


def test_a_custom_objective_trains_on_groups():
    before = start(Algorithm())
    after, metrics = step(BATCH, Algorithm(objective=custom_objective), before)
    assert float(metrics["grad/norm"]) > 0
    with pytest.raises(ConfigError, match=r"samples_per_prompt is 1. .* is Batch\(samples_per_pro"):
        step(replace(BATCH, samples_per_prompt=1), Algorithm(objective=custom_objective))


TOKENS = BATCH.tokens_BT
MINIBATCHES = Minibatches(np.zeros((3, 2), np.int32))
INVALID = {
    "one sequence": (dict(tokens_BT=TOKENS[0]), {}, r"tokens_BT must be .B, T., got shape \(12,\)"),
    "rewards of tokens": (
        dict(rewards_B=np.zeros((B, T), np.float32)),
        {},
        r"rewards_B must have shape \(8,\), got \(8, 12\)",
    ),
    "one reward": (dict(rewards_B=np.float32(1)), {}, r"rewards_B must have shape \(8,\), got"),
    "one log-prob a row": (
        dict(rollout_logp_BT=np.zeros(B, np.float32)),
        {},
        r"rollout_logp_BT must have shape \(8, 12\), got \(8,\)",
    ),
    "a mask of numbers": (
        dict(loss_mask_BT=BATCH.loss_mask_BT.astype(np.float32)),
        {},
        "must be bool, got float32",
    ),
    "groups that do not fit": (dict(samples_per_prompt=3), {}, r"groups of .* \(3\) rows, got 8"),
    "no minibatches": ({}, dict(a=MINI), "1 epochs of 2 minibatches need as many .*, got none"),
    "others' minibatches": ({}, dict(a=MINI, minibatches=MINIBATCHES), "got 3"),
    "minibatches of one update": ({}, dict(minibatches=MINIBATCHES), "got 3"),
    "microbatches": ({}, dict(microbatches=3), r"microbatches \(3\) must divide the batch's 8"),
    "no reference": ({}, dict(a=WITH_KL), "takes ref_logp_BT needs a reference"),
    "no critic": ({}, dict(a=PPO), "critic=own needs a critic's param"),
}


@pytest.mark.parametrize("case", INVALID)
def test_arrays_that_do_not_fit_are_named(case):
    changes, options, message = INVALID[case]
    with pytest.raises(ConfigError, match=message) as error:
        step(replace(BATCH, **changes), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [-1, CFG.vocab_size])
def test_ids_past_the_vocabulary_are_detected_on_hosts(bad):
    tokens = TOKENS.copy()
    tokens[3, 5] = bad
    with pytest.raises(ConfigError, match=rf"ids from 0 to 28 .*, got {bad} at \[3, 5\]"):
        step(replace(BATCH, tokens_BT=tokens))


def test_parameters_of_another_config_are_named():
    larger = replace(CFG, n_layers=4, vocab_size=31)
    params = init_params(jax.random.key(0), larger)
    for tree in (params, PARAMS):
        state = init_state(Trained(tree), SGD)
        with pytest.raises(ConfigError, match=r"params \w+ must have shape .* another config"):
            step(BATCH, state=state, scorer=Scorer(CFG, OPS))
    check_param_shapes(
        {k: v for k, v in MODEL.items() if k != "head"}, CFG
    )  # of a critic's backbone


def test_rows_that_minibatches_do_not_divide_are_named():
    with pytest.raises(ConfigError, match=r"minibatches \(3\) must divide the batch's 8 rows"):
        split_minibatches(BATCH, replace(MINI, minibatches=3), seed=(0,))
