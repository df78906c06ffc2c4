# SPDX-License-Identifier: Apache-2.0
"""How old the tokens of a batch are: counted, and refused beyond the bound. Plain numpy.

Step k trains on weights of version k-1; a token's staleness is how many versions before them it
was drawn. Next: jaxmoe/rollout/async_rollouts.py, which keeps to the bound.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.config import EngineError
from jaxmoe.records import Rollout
from jaxmoe.shapes import Metrics


def check_versions(rollouts: Sequence[Rollout], *, newest: int, max_staleness: int) -> Metrics:
    """Raises EngineError unless every token was drawn by versions newest - max_staleness .. newest.

    staleness/mean and staleness/max are over tokens, in versions; staleness/mixed_frac is the
    share of rollouts that more than one version drew.
    """
    for i, r in enumerate(rollouts):
        versions = r.weight_versions
        if versions.shape != r.tokens.shape or not versions.size:
            raise EngineError(
                f"{_name(i, r)} must carry one version of the weights per token: {len(versions)} "
                f"for {len(r.tokens)} tokens."
            )
        low, high = int(versions.min()), int(versions.max())
        if low < newest - max_staleness or high > newest:
            at = int(np.argmax((versions < newest - max_staleness) | (versions > newest)))
            allowed = (
                f"version {newest}"
                if max_staleness == 0
                else f"versions {newest - max_staleness} to {newest}"
            )
            raise EngineError(
                f"{_name(i, r)} must be drawn by {allowed} of the weights, the newest the state "
                f"after step {newest}; its token {at} carries version {versions[at]}. Nothing was "
                "trained on it."
            )
    age = newest - np.concatenate([r.weight_versions for r in rollouts])
    mixed = [r.weight_versions.min() != r.weight_versions.max() for r in rollouts]
    return {
        "staleness/mean": float(age.mean()),
        "staleness/max": int(age.max()),
        "staleness/mixed_frac": float(np.mean(mixed)),
    }


def _name(i: int, rollout: Rollout) -> str:
    return f"rollout {i} (prompt {rollout.prompt.id})"
