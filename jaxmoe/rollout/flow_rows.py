# SPDX-License-Identifier: Apache-2.0
"""Answers on their way through refilled rows, on the host.

Next: jaxmoe/rollout/native_flow.py gives them places.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxmoe.records import Rollout
from jaxmoe.rollout.replies import PendingReplies
from jaxmoe.rollout.turns import Episode


@dataclass(eq=False)
class FlowRequest:
    """One call of `generate`, in a thread that waits for the result."""

    rollouts: list[Rollout | None]
    replies: PendingReplies | None
    is_over: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class FlowRow:
    """One answer, which has a place or waits for one."""

    request: FlowRequest
    number: int  # among the answers of the request
    episode: Episode
    stream_2: np.ndarray
    parts: list[dict[str, np.ndarray]] = field(default_factory=list)  # of the turn, by chunk
    waits: bool = False  # for the environment

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled, in the present turn too."""
        return self.episode.n_sampled + self.n_in_turn

    @property
    def n_in_turn(self) -> int:
        return sum(len(part["tokens_BT"]) for part in self.parts)

    @property
    def length(self) -> int:
        """Number of all tokens of the context: of the prompt, turns and replies."""
        return self.episode.context_length + self.n_in_turn

    @property
    def read(self) -> np.ndarray:
        """All tokens of the context but the last, which no forward has read."""
        parts = [part["tokens_BT"] for part in self.parts]
        return np.concatenate([self.episode.context, *parts])[:-1]


def pending_replies(rows: Iterable[FlowRow]) -> dict[FlowRequest, PendingReplies]:
    """The replies for which these rows wait, by request."""
    return {row.request: row.request.replies for row in rows if row.waits and row.request.replies}
