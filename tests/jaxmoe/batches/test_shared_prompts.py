# SPDX-License-Identifier: Apache-2.0
"""Shared prompts: where their tokens go, and when they are shared.

That updates do not depend on it is in test_update.py and test_shared_prompts_exact.py.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from bigram import B, R, T, algorithm, make_batch, routed_batch

from jaxmoe.batches.batch import computed_tokens, padding_frac
from jaxmoe.batches.shared_prompts import PromptSharing, pack_groups, share_prompts
from jaxmoe.config import ConfigError
from jaxmoe.rl.minibatches import sharing_metrics, split_minibatches

LENGTHS = np.array([9, 7, 12, 8, 11, 9, 10])
SHARED = np.array([5, 5, 5, 5, 3, 3, 0])
GROUPS = np.array([0, 0, 0, 0, 1, 1, 2])


def test_shared_tokens_are_once_in_a_row():
    length, rows = 17, 2
    packing = pack_groups(LENGTHS, SHARED, GROUPS, length=length, rows=rows)
    shared, used = packing.shared, {}
    for i, n in enumerate(LENGTHS):
        prompt = [int(shared.start_B[i]) + t for t in range(SHARED[i])]
        unshared = [int(packing.start_B[i]) + t for t in range(n - SHARED[i])]
        assert len({place // length for place in (*prompt, *unshared)}) == 1  # one row
        stored = (prompt if shared.is_stored_B[i] else []) + unshared
        for place in stored:
            key = int(packing.microbatch_B[i]), place
            assert key not in used and place < rows * length
            used[key] = i
        first = int(packing.microbatch_B[i]), prompt[0] if prompt else None
        assert not prompt or GROUPS[used[first]] == GROUPS[i]  # its own group's
        assert shared.segment_B[i] < shared.branch_segment_B[i] <= shared.last_segment_B[i]
    assert len(set(shared.branch_segment_B)) == len(LENGTHS)
    # 5 + 4 + 2 + … do not fit into 17: the first group is cut and has two copies of its prompt.
    assert shared.is_stored_B[GROUPS == 0].sum() == 2
    assert shared.is_stored_B[GROUPS == 1].sum() == 1
    assert int(packing.count) == max(packing.microbatch_B) + 1
    with pytest.raises(ValueError, match="a row holds 11 tokens, sequence 2 has 12"):
        pack_groups(LENGTHS, SHARED, GROUPS, length=11, rows=1)


@pytest.mark.parametrize("unit, expected", [(1, 2), (2, 2), (3, 0)])
def test_prompts_are_shared_in_complete_units(unit, expected):
    """Prompts have three tokens."""
    shared = share_prompts(make_batch(), PromptSharing(4 * T, unit=unit), 1).packing.shared
    assert shared.length_B.tolist() == [expected] * B
    assert shared.is_stored_B.sum() == (B // R if expected else B)


def test_a_row_that_trains_nothing_is_packed_alone():
    batch = make_batch()
    batch.loss_mask_BT[1] = False
    shared = share_prompts(batch, PromptSharing(4 * T), 1).packing.shared
    assert shared.length_B.tolist() == [2, 0, *[2] * (B - 2)]
    assert len({*shared.segment_B[:R]}) == 2


def test_prompts_at_other_positions_are_not_shared():
    batch = make_batch()
    batch = replace(batch, positions_BT=np.array(batch.positions_BT))
    batch.positions_BT[1] += 1
    shared = share_prompts(batch, PromptSharing(4 * T), 1).packing.shared
    assert len({*shared.segment_B[:R]}) == 2 and shared.is_stored_B.sum() == B // R + 1


def test_prompts_of_different_experts_are_counted_unshared():
    batch = routed_batch()
    experts = batch.routed_experts_BTLA
    experts[:, :2] = experts[:1, :2]
    a, sharing = algorithm(), PromptSharing(32)  # a group of 32 tokens and one of 26
    assert sharing_metrics(*split_minibatches(batch, a, seed=(0,), sharing=sharing)) == {
        "batch/computed_tokens_frac": 2 * 32 / (B * T),
        "batch/unshared_prompts": 0,
    }
    experts[2, 1, 0] = experts[2, 1, 0, ::-1]
    packed, _ = split_minibatches(batch, a, seed=(0,), sharing=sharing)
    assert sharing_metrics(packed, None)["batch/unshared_prompts"] == 1
    assert packed.packing.shared.is_stored_B[:R].tolist() == [True, False, True, False]


def test_a_batch_is_shared_where_that_saves_enough():
    a, batch = algorithm(minibatches=2, old_logp="recomputed"), make_batch()
    split, sharing = partial(split_minibatches, batch, a, seed=(0,)), PromptSharing(32)
    frac = sharing_metrics(*split(sharing=sharing))["batch/computed_tokens_frac"]
    assert 0.5 < frac < 1
    for max_frac, shares in ((frac, True), (frac - 0.01, False)):
        packed, minibatches = split(sharing=replace(sharing, max_frac=max_frac))
        assert (packed.packing is not None) == (minibatches.packing is not None) == shares
        metrics = sharing_metrics(packed, minibatches)
        assert metrics == {"batch/computed_tokens_frac": frac if shares else 1.0}
    # Packed rows without sharing are what it is compared with.
    packed, _ = split_minibatches(
        batch,
        algorithm(),
        seed=(0,),
        tokens_per_microbatch=2 * T,
        sharing=PromptSharing(2 * T, max_frac=0.99),
    )
    unshared, _ = split_minibatches(batch, algorithm(), seed=(0,), tokens_per_microbatch=2 * T)
    assert packed.packing.shared is not None
    assert int(packed.packing.shared.unshared) == computed_tokens(unshared) == 4 * 2 * T


def test_padding_counts_the_tokens_that_are_stored():
    packed = share_prompts(make_batch(), PromptSharing(4 * T), 1)
    stored = int(make_batch().segment_ids_BT.sum()) - 2 * (B - B // R)
    assert padding_frac(packed) == pytest.approx(1 - stored / computed_tokens(packed))


def test_shuffled_rows_share_what_they_have_in_common():
    a = algorithm(minibatches=4, old_logp="recomputed")
    _, minibatches = split_minibatches(make_batch(), a, seed=(5,), sharing=PromptSharing(2 * T))
    stored = minibatches.packing.shared.is_stored_B
    is_grouped = np.array([rows[0] // R == rows[1] // R for rows in minibatches.rows_UB])
    assert is_grouped.any() and not is_grouped.all()
    np.testing.assert_array_equal(stored.sum(axis=1), np.where(is_grouped, 1, 2))


@pytest.mark.parametrize("fields", [{"length": 0}, {"rows": 0}, {"unit": 0}])
def test_sizes_below_one_are_refused(fields):
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        PromptSharing(**{"length": 4 * T} | fields)
