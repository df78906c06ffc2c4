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
        self, per_draw: int, max_lag: int, *, n_draws: int = 0, drawn: Iterable[int] = ()
    ) -> None:
        """The order after `n_draws` draws.

        drawn: the groups that were drawn before an older one.
        """
        self.per_draw, self.max_lag, self.n_draws = per_draw, max_lag, n_draws
        self.drawn = set(drawn)
        # The first that is not drawn: all that were, but these, are older.
        self.oldest = n_draws * per_draw - len(self.drawn)
        self._advance()

    def draw(self, finished: Collection[int]) -> list[int] | None:
        """Draw the oldest finished groups; None if the draw must wait for others.

        It waits for a group whose turn was `max_lag` draws ago. It can never wait for more groups
        than it takes, because each draw is the turn of equally many.
        """
        chosen = sorted(finished)[: self.per_draw]
        n_due = (self.n_draws + 1 - self.max_lag) * self.per_draw
        waits = any(
            number not in self.drawn and number not in finished
            for number in range(self.oldest, n_due)
        )
        if waits or len(chosen) < self.per_draw:
            return None
        self.drawn.update(chosen)
        self.n_draws += 1
        self._advance()
        return chosen

    def lag(self, number: int) -> int:
        """Draws between a group's turn and the last draw; negative if it was drawn early."""
        return self.n_draws - 1 - number // self.per_draw

    def _advance(self) -> None:
        while self.oldest in self.drawn:
            self.drawn.remove(self.oldest)
            self.oldest += 1
