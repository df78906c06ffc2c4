# SPDX-License-Identifier: Apache-2.0
"""A model without layers, a batch and a step of it: what the tests of the update share."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.batches.batch import Batch
from jaxmoe.model import init_critic, init_params, plain_ops
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.check_rl_step import check_rl_step
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, init_state
from jaxmoe.rl.update import CheckedStep, rl_step
from jaxmoe.rl.validate import check_algorithm
from tests.jaxmoe.small_models import FIVE_EXPERTS

EPS = float(np.finfo(np.float32).eps)
OPS = plain_ops()
CFG = FIVE_EXPERTS
B, T, R = 8, 12, 4
ENDS = np.array([12, 9, 6, 11, 7, 5, 12, 8])
SGD = optax.sgd(1.0)  # the update is minus the gradient
MODEL = init_params(jax.random.key(0), CFG)
PARAMS = {"embed": 8 * MODEL["embed"], "head": MODEL["head"]}


@dataclass(frozen=True)
class Bigram(Scorer):
    """A model without layers, which compiles in no time: each token knows the one before it."""

    def run_forward(self, params, batch):
        rows = batch if batch.packed is None else batch.packed
        return jnp.tanh(params["embed"][rows.tokens_BT]), {}


def make_batch(extra=0, shift=0.0):
    """Rows of 5 to 12 tokens in groups of 4 with one prompt of 3, padded on the right by `extra`
    more columns."""
    rng = np.random.default_rng(0)
    time, ends = np.arange(T)[None, :], ENDS[:, None]
    mask = (time >= 3) & (time < ends) & (time != 5)  # column 5 is a tool's

    def widen(x):
        return np.pad(x, ((0, 0), (0, extra)))

    length = T + extra
    tokens = np.where(time < ends, rng.integers(0, 29, (B, T)), 0).astype(np.int32)
    tokens[:, :3] = np.repeat(tokens[::R, :3], R, axis=0)
    return Batch(
        tokens_BT=widen(tokens),
        positions_BT=np.broadcast_to(np.arange(length, dtype=np.int32), (B, length)),
        segment_ids_BT=widen((time < ends).astype(np.int32)),
        loss_mask_BT=widen(mask),
        rollout_logp_BT=widen(
            np.where(mask, -3.4 + shift + 0.3 * rng.normal(size=(B, T)), 0.0).astype(np.float32)
        ),
        rewards_B=rng.normal(size=B).astype(np.float32),
        samples_per_prompt=R,
    )


def routed_batch(seed=0):
    """Batch with experts that no router would choose."""
    batch, dice = make_batch(), np.random.default_rng(seed)
    ranks = dice.random((*batch.tokens_BT.shape, CFG.n_layers, CFG.n_experts)).argsort(-1)
    chosen = ranks[..., : CFG.experts_per_token].astype(np.int8)
    return replace(batch, routed_experts_BTLA=chosen)


def start(a, tx=SGD, params=PARAMS, reference=None):
    critic = None
    if a.critic != "none":
        critic = init_critic(params, CFG, "float32", own_backbone=a.critic == "own")
        # a head of zeros would send nothing to the backbone
        critic["value_head"]["w_value"] = jnp.sin(jnp.arange(CFG.d_model, dtype=jnp.float32))
    return init_state(Trained(params, critic), tx, Frozen(reference))


def step_of(a, *, tx=SGD, scorer=None, **options):
    """`rl_step` without what it tells of each token."""
    scorer = scorer or Bigram(CFG, OPS, critic=a.critic)
    checked = {"algorithm": a, "scorer": scorer, "microbatches": options.pop("microbatches", 1)}

    def step(*arguments):
        return rl_step(*arguments, tx=tx, **checked, **options)[:2]

    return CheckedStep(step, partial(check_rl_step, **checked))


def algorithm(**fields):
    algorithm = Algorithm(**fields)
    check_algorithm(algorithm, R)
    return algorithm
