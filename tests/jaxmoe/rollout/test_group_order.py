# SPDX-License-Identifier: Apache-2.0
"""Groups in the order of admission, whatever order they finish in, and no bias by length."""

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.rollout.group_order import GroupOrder


@given(
    data=st.data(),
    per_draw=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    ahead=st.integers(1, 3),
    n_draws=st.integers(1, 8),
)
def test_each_group_is_drawn_once_within_the_lag(data, per_draw, max_lag, ahead, n_draws):
    order, finished, drawn = GroupOrder(per_draw, max_lag), set(), []
    while order.n_draws < n_draws:
        admitted = min(n_draws, order.n_draws + 1 + ahead) * per_draw
        chosen = order.draw(finished)
        if chosen is None:
            unfinished = sorted(set(range(admitted)) - finished - set(drawn))
            assert unfinished, "the order waits for a group that nobody samples"
            finished.add(data.draw(st.sampled_from(unfinished)))
            continue
        assert chosen == sorted(finished)[:per_draw]
        assert all(order.lag(number) <= max_lag for number in chosen)
        finished -= set(chosen)
        drawn += chosen
        # Another process continues from what a checkpoint has.
        early = [number for number in drawn if number > order.oldest]
        order = GroupOrder(per_draw, max_lag, n_draws=order.n_draws, drawn=early)
    assert sorted(drawn) == list(range(n_draws * per_draw))


def test_without_a_lag_the_order_is_strict():
    order = GroupOrder(2, 0)
    assert order.draw({1, 2, 3}) is None
    assert order.draw({0, 1, 3}) == [0, 1] and order.draw({3}) is None
    assert order.draw({2, 3}) == [2, 3]


def test_a_group_is_overtaken_until_due():
    order = GroupOrder(2, 1)
    assert order.draw({1, 2, 3}) == [1, 2]
    assert order.draw({3, 4, 5}) is None
    assert order.draw({0, 3, 4}) == [0, 3] and order.lag(0) == 1
    assert (order.oldest, order.drawn) == (4, set())


class FinishedFirst(GroupOrder):
    """Trains groups as they finish, as if none were ever due: a planted fault."""

    def draw(self, finished):
        chosen = list(finished)[: self.per_draw]
        self.n_draws += len(chosen) == self.per_draw
        return chosen if len(chosen) == self.per_draw else None


def simulate(kind, *, steps=50, per_draw=64, max_lag=1, ahead=8, step_s=10):
    """Lengths of what is admitted and of what is trained in the steps, of an engine whose answers
    take as long as they are, with room for all."""
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(4), np.log(512), 5000)).astype(int)
    order, now, n_admitted = kind(per_draw, max_lag), 0.0, 0
    running, finished, trained = [], {}, []
    for step in range(steps):
        while n_admitted < (step + 1 + ahead) * per_draw:
            heapq.heappush(running, (now + lengths[n_admitted], n_admitted))
            n_admitted += 1
        now += step_s
        while True:
            while running and running[0][0] <= now:
                finished[heapq.heappop(running)[1]] = True
            if (chosen := order.draw(finished)) is not None:
                break
            now = running[0][0]
        for number in chosen:
            del finished[number]
        trained += chosen
    return lengths[: steps * per_draw], lengths[trained]


def ks_p_value(kind):
    from scipy import stats  # a second of a core, which every worker would pay

    return stats.ks_2samp(*simulate(kind), method="asymp").pvalue


def test_trained_lengths_are_those_of_admission():
    assert ks_p_value(GroupOrder) > 0.5


def test_finished_first_prefers_short_answers():
    """The fault that the order prevents is seen by the same test."""
    assert ks_p_value(FinishedFirst) < 0.01
