# SPDX-License-Identifier: Apache-2.0
"""Tokens that a step computes at full lengths: those of the batches that a run packs."""

from functools import partial

import numpy as np
import pytest

from jaxmoe.batches.batch import computed_tokens, supervised_batch
from jaxmoe.batches.computed_tokens import (
    count_full_lengths,
    describe_sharing,
    shared_at_full_lengths,
)
from jaxmoe.batches.sharing_from_config import sharing_from_config
from jaxmoe.config_file import load_config, override
from jaxmoe.model.ops import make_ops
from jaxmoe.records import Prompt
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import split_minibatches
from pallas_kernels import sink_attention

TINY = load_config("tiny.py")  # 16 groups of 16 samples, prompts of 52 tokens, answers of 6
PACKED = ("optim.tokens_per_microbatch=580",)  # ten rows of 58 tokens


def computed_of(*changes):
    cfg = override(TINY, *changes)
    return count_full_lengths(cfg, sharing_from_config(cfg, make_ops(cfg).attend))


def full_batch(cfg):
    """A batch whose prompts and answers have full length."""
    rng, r = np.random.default_rng(0), cfg.rollout
    tokens = rng.integers(0, 9, (r.prompts_per_step, cfg.data.max_prompt_tokens)).tolist()
    prompts = [Prompt(i, "", tuple(x), None) for i, x in enumerate(tokens)]
    prompts = [prompt for prompt in prompts for _ in range(r.samples_per_prompt)]
    answers = rng.integers(0, 9, (len(prompts), r.max_new_tokens)).tolist()
    return supervised_batch(prompts, answers, length=cfg.context, pad_id=0)


@pytest.mark.parametrize(
    "changes",
    [(), PACKED, ("model.numerics=invariant",), ("mesh.sequence=2",), ("optim.microbatches=8",)],
)
def test_counts_are_those_of_a_packed_batch(changes):
    cfg = override(TINY, *changes)
    sharing = sharing_from_config(cfg, sink_attention)
    batch, _ = split_minibatches(
        full_batch(cfg),
        Algorithm(),
        seed=(0,),
        tokens_per_microbatch=cfg.optim.tokens_per_microbatch,
        sharing=sharing,
    )
    lengths = count_full_lengths(cfg, sharing)
    assert lengths.batch == lengths.updates
    shared = batch.packing.shared
    assert lengths.batch.tokens == computed_tokens(batch) and shared is not None
    assert lengths.batch.unshared == shared.unshared
    assert lengths.batch.microbatches == batch.packing.count
    assert lengths.batch.prompts == shared.is_stored_B.sum()
    assert lengths.batch.shared == shared.length_B[0]


def test_the_tokens_of_a_group_follow_the_formula():
    P, A, G = 52, 6, 16
    batch, _ = computed_of()
    assert batch.frac == (P - 1 + G * (A + 1)) / (G * (P + A))
    assert (batch.microbatches, batch.prompts, batch.shared) == (1, 16, 51)
    # Ten rows of 58 tokens a microbatch: 256 rows take 26, and 16 groups of 163 tokens six.
    packed = computed_of(*PACKED).updates
    assert (packed.microbatches, packed.tokens, packed.unshared) == (6, 3480, 15080)


def test_shuffled_minibatches_share_less_than_the_batch():
    """A minibatch of 64 rows has four of each prompt on average."""
    batch, updates = computed_of("loss.minibatches=4", "loss.old_logp=recomputed")
    assert batch.prompts == 16 and 32 < updates.prompts <= 64
    assert batch.frac < updates.frac < 0.75


@pytest.mark.parametrize(
    "attend, changes, text",
    [
        (
            sink_attention,
            (),
            "computed once for their 16 samples: 2,608 of 14,848 tokens (0.18) in a pass over a "
            "batch of full lengths, where attention runs in XLA or by mosaic_gpu or mosaic_tpu",
        ),
        (
            partial(sink_attention, impl="xla"),
            ("optim.share_prompts=on", "optim.microbatches=32"),
            "computed 2 times for their 16 samples: 3,424 of 14,848 tokens (0.23) in a pass over "
            "a batch of full lengths",
        ),
        (sink_attention, ("optim.share_prompts=off",), "optim.share_prompts=off"),
        (partial(sink_attention, impl="triton"), (), "got triton. Try --set kernels=xla"),
        (
            sink_attention,
            ("data.max_prompt_tokens=6", "rollout.max_new_tokens=52"),
            "computed for each of their 16 samples: 14,848 tokens in a pass over a batch of full "
            "lengths; sharing them would leave 0.92 of these, and optim.share_prompts=auto shares "
            "where at most 0.75 is left",
        ),
    ],
)
def test_one_line_says_what_is_shared(attend, changes, text):
    line = describe_sharing(override(TINY, *changes), attend)
    assert line.startswith("  prompts      computed ") and line.endswith(text)
    assert "\n" not in line


def test_single_samples_have_no_line():
    single_samples = ("rollout.samples_per_prompt=1", "loss.advantages=reinforce_pp_advantages")
    assert describe_sharing(override(TINY, *single_samples), sink_attention) == ""


def test_a_batch_that_saves_too_little_is_unshared():
    assert shared_at_full_lengths(TINY, sink_attention) is not None
    large = load_config("gptoss20b.py")  # a row holds one sequence of full length
    assert sharing_from_config(large, sink_attention) is not None
    assert shared_at_full_lengths(large, sink_attention) is None
