# SPDX-License-Identifier: Apache-2.0
"""Groups in threads: admitted in order, refilled at once, drawn once each, and nobody hangs."""

import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import EngineError
from jaxmoe.rollout.group_flow import GroupFlow, GroupRollouts
from jaxmoe.rollout.group_order import GroupOrder

LAST, PER_DRAW = 6, 2
SOON = 20.0  # seconds in which anything here must happen


def wait_until(holds):
    end = time.perf_counter() + SOON
    while not holds():
        assert time.perf_counter() < end
        time.sleep(0.001)


class Engine:
    """Answers a group when it is told to, or after its time."""

    def __init__(self, seconds=None):
        self.seconds, self.version = seconds, 0
        self.admitted, self.at_once, self.most_at_once = [], 0, 0
        self.free: dict[int, threading.Event] = {}
        self.closed, self.lock = threading.Event(), threading.Lock()

    def admit(self, number):
        self.admitted.append(number)
        self.free[number] = threading.Event()
        version = self.version

        def sample():
            with self.lock:
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
            if self.seconds is None:
                while not self.free[number].wait(0.001):
                    if self.closed.is_set():
                        raise EngineError("closed")
            else:
                time.sleep(self.seconds[number % len(self.seconds)])
            with self.lock:
                self.at_once -= 1
            return number, version

        return sample


def open_flow(engine, *, max_lag=0, ahead=1, places=4, step=0, begun=0, **saved):
    finished = saved.pop("finished", None)
    order = GroupOrder(PER_DRAW, max_lag, **saved)
    sizes = dict(places=places, begun=begun, ahead=ahead, last=LAST, step=step)
    return GroupFlow(engine.admit, order, **sizes, finished=finished)


def test_more_groups_begin_than_have_places():
    engine = Engine()
    flow = open_flow(engine, places=1, begun=3)
    flow.weights_synced(0)
    wait_until(lambda: engine.at_once == 3)
    assert 0 <= flow.idle_metrics(0.0)["rollout/engine_idle_frac"] < 1
    flow.close(engine.closed.set)
    assert engine.most_at_once == 3


def open_rollouts(flow, engine, *, ahead=1, first=1, stop=lambda: False):
    def make(step):
        return list(flow.draw(step)[0].values())

    return GroupRollouts(
        make,
        flow,
        first=first,
        last=LAST,
        ahead=ahead,
        stop=stop,
        interrupt=engine.closed.set,
        save=lambda step: ({}, b""),
    )


@given(
    seconds=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004]), min_size=12, max_size=12),
    trained_s=st.lists(st.sampled_from([0.0, 0.002]), min_size=LAST, max_size=LAST),
    max_lag=st.integers(0, 2),
    ahead=st.integers(1, 3),
    places=st.integers(1, 5),
)
def test_tokens_and_groups_are_within_their_bounds(seconds, trained_s, max_lag, ahead, places):
    engine, trained = Engine(seconds), []
    flow = open_flow(engine, max_lag=max_lag, ahead=ahead, places=places)
    with closing(open_rollouts(flow, engine, ahead=ahead)) as rollouts:
        rollouts.weights_synced(0)
        for step in range(1, LAST + 1):
            for number, version in rollouts.take_batch(step):
                assert step - 1 - max_lag - ahead <= version <= step - 1
                assert step - 1 <= number // PER_DRAW + max_lag
                trained.append(number)
            time.sleep(trained_s[step - 1])
            engine.version = step
            rollouts.weights_synced(step)
    assert sorted(trained) == engine.admitted == list(range(LAST * PER_DRAW))
    assert engine.most_at_once <= places
    assert max_lag or trained == engine.admitted


def test_a_place_is_refilled_at_once():
    engine = Engine()
    flow = open_flow(engine, places=2)
    flow.weights_synced(0)
    assert engine.admitted == [0, 1, 2, 3]
    wait_until(lambda: engine.at_once == 2)
    engine.free[1].set()
    engine.free[2].set()
    wait_until(lambda: flow.state(0).finished.keys() == {1, 2})
    wait_until(lambda: engine.at_once == 2)  # 0 still runs, and 3 began
    assert flow.state(0).unfinished == 2
    flow.close(engine.closed.set)
    assert flow._n_running == 0


def test_a_state_returns_what_later_steps_drew():
    engine = Engine([0.0])
    flow = open_flow(engine, ahead=2)
    flow.weights_synced(0)
    drawn = [list(flow.draw(step)[0]) for step in (1, 2)]
    state = flow.state(1)
    assert (state.n_draws, state.oldest, state.drawn) == (1, 2, [])
    assert {*drawn[1]} <= state.finished.keys() and not state.finished.keys() & {*drawn[0]}
    wait_until(lambda: not flow.state(1).unfinished)
    state = flow.state(1)
    again = Engine([0.0])
    resumed = open_flow(again, step=1, n_draws=1, drawn=state.drawn, finished=state.finished)
    resumed.weights_synced(1)
    assert again.admitted == [2, 3, 4, 5]
    assert [list(resumed.draw(step)[0]) for step in (2, 3)] == [[2, 3], [4, 5]]
    assert again.most_at_once == 0


def test_overtaken_groups_are_in_the_state():
    engine = Engine()
    flow = open_flow(engine, max_lag=1)
    flow.weights_synced(0)
    for number in (1, 2):
        engine.free[number].set()
    assert list(flow.draw(1)[0]) == [1, 2]
    state = flow.state(1)
    assert (state.oldest, state.drawn, state.unfinished) == (0, [1, 2], 2)
    again = Engine([0.0])
    resumed = open_flow(again, max_lag=1, step=1, n_draws=1, drawn=state.drawn)
    resumed.weights_synced(1)
    groups, metrics = resumed.draw(2)
    # The overtaken one, and the first to finish of those that were never drawn.
    assert list(groups)[0] == 0 and not {1, 2} & groups.keys() and len(groups) == 2
    assert metrics["rollout/group_lag_max"] == 1
    flow.close(engine.closed.set)


def test_only_older_weights_are_waited_for():
    engine = Engine()
    flow = open_flow(engine)
    flow.weights_synced(0)
    for number in (0, 1):
        engine.free[number].set()
    flow.draw(1)
    flow.weights_synced(1)  # admits 4 and 5
    settled = threading.Thread(target=flow.settle, args=(1, lambda: False))
    settled.start()
    engine.free[2].set()
    time.sleep(0.02)
    assert settled.is_alive()
    engine.free[3].set()
    settled.join(SOON)
    assert not settled.is_alive() and flow.state(1).unfinished == 2
    flow.close(engine.closed.set)


def test_an_error_of_a_group_ends_the_draw():
    engine = Engine()
    flow = open_flow(engine)
    with closing(open_rollouts(flow, engine)) as rollouts:
        rollouts.weights_synced(0)
        engine.closed.set()
        with pytest.raises(EngineError, match="closed"):
            rollouts.take_batch(1)


def test_a_stop_ends_groups_and_the_draw():
    engine, stopping = Engine(), threading.Event()
    flow = open_flow(engine)
    rollouts = open_rollouts(flow, engine, stop=stopping.is_set)
    with closing(rollouts):
        rollouts.weights_synced(0)
        wait_until(lambda: engine.at_once == 4)
        stopping.set()
        assert rollouts.take_batch(1) is None
        assert flow.state(0).unfinished == 4
    assert engine.closed.is_set() and flow._n_running == 0 and not rollouts._thread.is_alive()


def test_idle_shares_are_those_of_engine_and_trainer():
    engine = Engine()
    flow = open_flow(engine, places=8)
    with closing(open_rollouts(flow, engine)) as rollouts:
        rollouts.weights_synced(0)
        threading.Timer(0.2, lambda: [free.set() for free in engine.free.values()]).start()
        rollouts.take_batch(1)
        metrics = rollouts.wait_metrics()
        assert 0.5 <= metrics["rollout/engine_idle_frac"] < 0.8  # 4 of 8 places
        assert metrics["rollout/trainer_idle_frac"] > 0.5
        time.sleep(0.1)
        metrics = rollouts.wait_metrics()
        assert (
            metrics["rollout/engine_idle_frac"] > 0.9 and not metrics["rollout/trainer_idle_frac"]
        )


def test_a_thread_that_cannot_start_ends_the_draw(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    engine = Engine(seconds=(0.0,))
    flow = open_flow(engine)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    flow.weights_synced(0)
    with pytest.raises(RuntimeError, match="start new thread"):
        flow.draw(1)
    flow.close(lambda: None)
    assert flow.state(0).unfinished == len(engine.admitted)


def test_discarded_groups_are_left_out_of_the_state():
    engine = Engine(seconds=(0.0,))
    flow = open_flow(engine)
    flow.weights_synced(0)
    drawn, _ = flow.draw(1)
    wait_until(lambda: not flow.state(0).unfinished)
    kept = flow.state(0)
    flow.discard_drawn()
    state = flow.state(0)
    assert kept.finished.keys() - state.finished.keys() == drawn.keys()
    assert (state.oldest, state.drawn, state.n_draws) == (kept.oldest, kept.drawn, kept.n_draws)
    assert state.unfinished == len(drawn)
    flow.close(lambda: None)
