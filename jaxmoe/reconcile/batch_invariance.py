# SPDX-License-Identifier: Apache-2.0
"""A test of batch invariance: log-probs that do not depend on the other rows of the batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmoe.records import Rollout


class BatchInvariance(NamedTuple):
    """Comparison of answers sampled in a batch with the same answers sampled in a smaller batch."""

    answers: int
    tokens: int  # of the larger batch
    n_same: int  # of these, before the first token that was sampled differently
    max_gap: float  # largest |Δlogp| of those, nats


def compare_batches(batched: Sequence[Rollout], single: Sequence[Rollout]) -> BatchInvariance:
    """Compare the answers to one prompt, sampled with the same random streams in both batches."""
    n_same, max_gap = 0, 0.0
    for a, b in zip(batched, single, strict=True):
        shortest = min(len(a.tokens), len(b.tokens))
        differs = np.flatnonzero(a.tokens[:shortest] != b.tokens[:shortest])
        end = int(differs[0]) if differs.size else shortest
        is_sampled = a.sampled_mask[:end] & b.sampled_mask[:end]
        logp_a, logp_b = (r.rollout_logp[:end][is_sampled].astype(np.float64) for r in (a, b))
        n_same += len(logp_a)
        max_gap = max(max_gap, float(np.abs(logp_a - logp_b).max(initial=0.0)))
    return BatchInvariance(len(batched), sum(a.n_sampled for a in batched), n_same, max_gap)
