# SPDX-License-Identifier: Apache-2.0
"""Report episodes that the infrastructure spoilt, and stop a run that loses too many.

A lost episode has no reward: a failure that is not the policy's own must not be trained on.
Next: jaxmoe/environments/episodes.py finds them.
"""

from collections import Counter
from collections.abc import Sequence

import jax

from jaxmoe.config import EngineError
from jaxmoe.data.rows import Source
from jaxmoe.observe.printable import escape_unprintable
from jaxmoe.records import Rollout


def describe_lost(rollouts: Sequence[Rollout], source: Source) -> str:
    """One sentence: how many episodes are lost, why, and the first of them; "" if none is."""
    lost = [rollout for rollout in rollouts if rollout.lost]
    if not lost:
        return ""
    causes = ", ".join(f"{n} {cause}" for cause, n in Counter(r.lost for r in lost).most_common())
    row = lost[0].prompt.id
    location = source[row].location or f"row {row}"
    return (
        f"{len(lost)} of {len(rollouts)} episodes are lost and have no reward ({causes}); the "
        f"first is of {location}: {escape_unprintable(lost[0].env_fault)}"
    )


def report_lost(rollouts: Sequence[Rollout], source: Source, limit: float) -> None:
    """Print a line if episodes are lost. Raises EngineError if more than this share are."""
    n_lost = sum(bool(rollout.lost) for rollout in rollouts)
    if n_lost > limit * len(rollouts):
        raise EngineError(
            f"at most rollout.max_lost_frac ({limit:g}) of the episodes may be lost; "
            f"{describe_lost(rollouts, source)}. Correct the environment, then start the same "
            "command again, or try --set rollout.max_lost_frac=1."
        )
    if n_lost and jax.process_index() == 0:
        print(f"! {describe_lost(rollouts, source)}", flush=True)
