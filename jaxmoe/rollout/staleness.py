# SPDX-License-Identifier: Apache-2.0
"""Staleness of a batch's tokens: metrics, and a check of the limit. Plain numpy.

Step k trains weights of version k-1. The staleness of a token is the number of versions between
these weights and those that sampled it. Next: jaxmoe/rollout/async_rollouts.py observes the limit.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.config import EngineError
from jaxmoe.records import Rollout
from jaxmoe.shapes import Metrics


def check_versions(rollouts: Sequence[Rollout], *, newest: int, max_staleness: int) -> Metrics:
    """Check that versions newest - max_staleness .. newest sampled every token; return metrics.

    The environment's tokens were not sampled, so their versions have no meaning.
    staleness/mean and staleness/max are over sampled tokens, in versions; staleness/mixed_frac is
    the share of rollouts sampled by more than one version. Raises EngineError for other versions.
    """
    sampled_versions = list[np.ndarray]()
    for i, r in enumerate(rollouts):
        versions, is_sampled = r.weight_versions, r.sampled_mask
        if versions.shape != r.tokens.shape or not versions.size:
            raise EngineError(
                f"{_format_rollout(i, r)} must carry one weight version per token, got "
                f"{len(versions)} for {len(r.tokens)} tokens."
            )
        sampled_versions.append(versions[is_sampled])
        low, high = int(sampled_versions[-1].min()), int(sampled_versions[-1].max())
        if low < newest - max_staleness or high > newest:
            is_wrong = (versions < newest - max_staleness) | (versions > newest)
            t = int(np.argmax(is_wrong & is_sampled))
            allowed = (
                f"version {newest}"
                if max_staleness == 0
                else f"versions {newest - max_staleness} to {newest}"
            )
            raise EngineError(
                f"{_format_rollout(i, r)} must be sampled by weight {allowed}, where {newest} is "
                f"the state after step {newest}; its token {t} carries version {versions[t]}. The "
                "batch was not trained on."
            )
    age = newest - np.concatenate(sampled_versions)
    mixed = [versions.min() != versions.max() for versions in sampled_versions]
    return {
        "staleness/mean": float(age.mean()),
        "staleness/max": int(age.max()),
        "staleness/mixed_frac": float(np.mean(mixed)),
    }


def _format_rollout(i: int, rollout: Rollout) -> str:
    return f"rollout {i} (prompt {rollout.prompt.id})"
