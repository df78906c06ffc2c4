# SPDX-License-Identifier: Apache-2.0
"""The order in which groups of samples are trained, however long each of them takes.

If groups were trained as they finish, short answers would be preferred. Groups are numbered in the
order of admission. A draw takes as many as a step has prompts, and group g has its turn in draw
g // per_draw. A younger group may overtake, but none is trained more than `max_lag` draws after its
turn. Next: jaxmoe/rollout/group_flow.py.
"""

from collections.abc import Collection, Iterable


class GroupOrder:
    """Groups that are drawn and those that are not; numbers only."""

    def __init__(
        self, per_draw: int, max_lag: int, *, n_draws: int = 0, taken: Iterable[int] = ()
    ) -> None:
        """The order after `n_draws` draws.

        taken: the groups that were drawn, possibly without those older than `oldest`.
        """
        self.per_draw, self.max_lag, self.n_draws = per_draw, max_lag, n_draws
        self.taken = set(taken)  # those younger than `oldest`
        # All others are older than every group that is not drawn.
        self.oldest = n_draws * per_draw - len(self.taken)
        self._advance()

    def take(self, finished: Collection[int]) -> list[int] | None:
        """Draw the oldest finished groups; None if the draw must wait for others.

        It waits for a group whose turn was `max_lag` draws ago. It can never wait for more groups
        than it takes, because each draw is the turn of equally many.
        """
        chosen = sorted(finished)[: self.per_draw]
        n_due = (self.n_draws + 1 - self.max_lag) * self.per_draw
        waits = any(
            number not in self.taken and number not in finished
            for number in range(self.oldest, n_due)
        )
        if waits or len(chosen) < self.per_draw:
            return None
        self.taken.update(chosen)
        self.n_draws += 1
        self._advance()
        return chosen

    def lag(self, number: int) -> int:
        """Draws between a group's turn and the last draw; negative if it was drawn early."""
        return self.n_draws - 1 - number // self.per_draw

    def _advance(self) -> None:
        while self.oldest in self.taken:
            self.taken.remove(self.oldest)
            self.oldest += 1
