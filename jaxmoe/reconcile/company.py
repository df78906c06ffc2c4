# SPDX-License-Identifier: Apache-2.0
"""Does an engine's log-prob of a token depend on what else it computes at the time?"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmoe.records import Rollout


class Company(NamedTuple):
    """Answers drawn in a batch, and once more without the others."""

    answers: int
    tokens: int  # in the batch
    same: int  # of these, before the first that was drawn otherwise
    largest: float  # |Δlogp| of those, nats


def company(among: Sequence[Rollout], alone: Sequence[Rollout]) -> Company:
    """The same prompt's samples, of the same random streams."""
    same, largest = 0, 0.0
    for a, b in zip(among, alone, strict=True):
        shortest = min(len(a.tokens), len(b.tokens))
        differs = np.flatnonzero(a.tokens[:shortest] != b.tokens[:shortest])
        end = int(differs[0]) if differs.size else shortest
        gap = np.abs(a.rollout_logp[:end].astype(np.float64) - b.rollout_logp[:end])
        same, largest = same + end, max(largest, float(gap.max(initial=0.0)))
    return Company(len(among), sum(len(a.tokens) for a in among), same, largest)
