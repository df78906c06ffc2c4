# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant numerics by the kernels of a GPU or TPU: the engine against the trainer.

    JAX_PLATFORMS=cuda python -m pytest -m gpu tests/jaxmoe/rollout/test_invariant_on_chip.py
    JAX_PLATFORMS=tpu python -m pytest -m tpu tests/jaxmoe/rollout/test_invariant_on_chip.py

By default the kernels of a TPU are interpreted, for a few tokens.
"""

import contextlib
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.model import init_params, plain_ops, tiny
from jaxmoe.model.ops import invariant_ops
from jaxmoe.model.params import cast_for_forward
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained
from jaxmoe.rollout.native import NativeEngine
from tests.pallas_kernels.interpreted import TPU, interpreted

CFG = tiny(
    dtype="bfloat16",
    d_model=256,
    head_dim=64,
    n_q_heads=4,
    n_kv_heads=2,
    n_experts=4,
    experts_per_token=2,
    d_expert=256,
    sliding_window=16,
    vocab_size=265,
    vocab_multiple=128,
)
EXACT = replace(CFG, dtype="float32")  # few tokens of bfloat16 would agree by rounding
RUNS = [
    pytest.param(TPU, True, 6, marks=pytest.mark.slow, id="interpreted"),
    pytest.param("mosaic_gpu_invariant", False, 300, marks=pytest.mark.gpu, id="gpu"),
    pytest.param(TPU, False, 300, marks=pytest.mark.tpu, id="tpu"),
]


def differing(ops, new, cfg):
    """Numbers of log-probs and of experts of 8 answers that differ between engine and trainer."""
    params = init_params(jax.random.key(0), cfg)
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 2 else x, params)  # hot and peaked
    engine = NativeEngine(
        cfg, ops, max_prompt_tokens=40, max_new_tokens=new, max_rows=8, keep_experts=True
    )
    engine.load(params, 0)
    dice = np.random.default_rng(0)
    prompts = [
        Prompt(i, "", tuple(int(x) for x in dice.integers(0, 256, size)), None)
        for i, size in enumerate((3, 21, 37, 8))
    ]
    rollouts = engine.generate(prompts, Sampling(new, (264,)), seed=1, samples=2)
    batch = rollout_batch(
        rollouts,
        np.zeros(8, np.float32),
        samples=2,
        length=40 + new,
        pad_id=0,
        n_experts=cfg.n_experts,
    )
    batch = jax.tree.map(jax.numpy.asarray, batch)
    scored = jax.jit(Scorer(cfg, ops).score_policy)(Trained(cast_for_forward(params, cfg)), batch)
    answer_BT = np.asarray(batch.loss_mask_BT)
    trainer_logp, engine_logp = (
        np.asarray(x)[answer_BT] for x in (scored["logp_BT"], batch.rollout_logp_BT)
    )
    assert np.abs(engine_logp).max() > 0.1
    read_BT = np.zeros_like(answer_BT)
    for row, r in enumerate(rollouts):
        read_BT[row, : len(r.routed_experts)] = True
    reported = np.asarray(batch.routed_experts_BTLA)[read_BT]
    return (trainer_logp != engine_logp).sum(), (
        np.asarray(scored["experts_BTLA"])[read_BT] != reported
    ).sum()


@pytest.mark.parametrize("impl, interpret, new", RUNS)
def test_engine_log_probs_and_experts_match_trainers_bitwise(impl, interpret, new):
    with interpreted(impl) if interpret else contextlib.nullcontext():
        ops = invariant_ops(plain_ops(), impl)
        assert differing(ops, new, EXACT if interpret else CFG) == (0, 0)


@pytest.mark.slow
def test_decoding_in_another_order_changes_bits():
    plain = plain_ops()
    with interpreted(TPU):
        ops = invariant_ops(plain, TPU)
        assert differing(replace(ops, decode=plain.decode), 6, EXACT)[0] > 0
