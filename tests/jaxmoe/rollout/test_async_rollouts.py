# SPDX-License-Identifier: Apache-2.0
"""Batches made ahead: in order, once each, never staler than allowed, and nobody waits for ever."""

import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.rollout import async_rollouts as module
from jaxmoe.rollout.async_rollouts import AsyncRollouts, SyncRollouts

LAST = 7
SOON = 20.0  # seconds in which anything here must happen


def open_async(
    make, *, first=1, last=LAST, max_staleness=1, stop=lambda: False, interrupt=lambda: None
):
    return AsyncRollouts(
        make, first=first, last=last, max_staleness=max_staleness, stop=stop, interrupt=interrupt
    )


def wait_until(holds):
    end = time.perf_counter() + SOON
    while not holds():
        assert time.perf_counter() < end
        time.sleep(0.001)


moments = st.lists(st.sampled_from([0.0, 0.0, 0.0005, 0.003]), min_size=LAST, max_size=LAST)


@given(
    max_staleness=st.integers(1, 4),
    made_s=moments,
    trained=moments,
    measured=moments,
    scored=st.sets(st.integers(1, LAST)),
    first=st.integers(1, 4),
)
def test_batches_are_in_order_once_within_the_bound(
    max_staleness, made_s, trained, measured, scored, first
):
    version = first - 1
    begun: list[int] = []
    finished = threading.Event()

    def make(step):
        assert not finished.is_set()
        assert version >= step - 1 - max_staleness
        begun.append(step)
        time.sleep(made_s[step - 1])
        assert not finished.is_set()
        return step, version

    with closing(open_async(make, first=first, max_staleness=max_staleness)) as batches:
        batches.weights_synced(version)
        for step in range(first, LAST + 1):
            batch, drawn_by = batches.take_batch(step)
            assert batch == step and step - 1 - max_staleness <= drawn_by <= step - 1
            time.sleep(trained[step - 1])
            version = step
            if step in scored:
                with batches.paused():
                    finished.set()
                    time.sleep(measured[step - 1])
                    finished.clear()
            batches.weights_synced(step)
    assert begun == list(range(first, LAST + 1))
    assert not batches._thread.is_alive()


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_the_bound_is_used_whole(max_staleness):
    """A trainer that sleeps leaves `max_staleness` batches beside its own, and not one more."""
    begun = []
    with closing(
        open_async(lambda step: begun.append(step) or step, max_staleness=max_staleness)
    ) as batches:
        batches.weights_synced(0)
        wait_until(lambda: len(begun) == 1 + max_staleness)
        assert batches.take_batch(1) == 1
        time.sleep(0.05)
        assert begun == list(range(1, 2 + max_staleness))
        batches.weights_synced(1)
        wait_until(lambda: len(begun) == 2 + max_staleness)


def test_no_batch_starts_before_the_first_weights():
    begun = []
    with closing(open_async(lambda step: begun.append(step) or step, first=5)) as batches:
        time.sleep(0.05)
        assert begun == []
        batches.weights_synced(4)
        assert batches.take_batch(5) == 5


def test_a_pause_ends_the_batch_and_starts_none():
    begun = []

    def make(step):
        begun.append(step)
        time.sleep(0.02)

    with closing(open_async(make, last=50, max_staleness=99)) as batches:
        batches.weights_synced(0)
        wait_until(lambda: batches._making)
        with batches.paused():
            n_begun = len(begun)
            time.sleep(0.1)
            assert len(begun) == n_begun and not batches._making
        wait_until(lambda: len(begun) > n_begun)


class Broken(Exception):
    pass


def fails_at(bad):
    def make(step):
        if step == bad:
            raise Broken(f"batch {step}")
        return step

    return make


def test_an_error_precedes_batches_that_are_ready():
    with closing(open_async(fails_at(2), max_staleness=3)) as batches:
        batches.weights_synced(0)
        wait_until(lambda: not batches._thread.is_alive())
        with pytest.raises(Broken, match="batch 2"):
            batches.take_batch(1)
        with pytest.raises(Broken), batches.paused():
            raise AssertionError("the error comes first")


def test_an_error_wakes_a_trainer_that_waits():
    def make(step):
        time.sleep(0.05)
        raise Broken

    with closing(open_async(make)) as batches:
        batches.weights_synced(0)
        with pytest.raises(Broken):
            batches.take_batch(1)


def test_a_stop_request_interrupts_the_batch():
    stopping, interrupted = threading.Event(), threading.Event()

    def make(step):
        assert interrupted.wait(SOON)
        raise Broken("as an engine does that was closed")

    batches = open_async(make, stop=stopping.is_set, interrupt=interrupted.set)
    with closing(batches):
        batches.weights_synced(0)
        threading.Timer(0.05, stopping.set).start()
        start = time.perf_counter()
        assert batches.take_batch(1) is None
        assert time.perf_counter() - start < SOON / 2
    assert interrupted.is_set() and not batches._thread.is_alive()


def test_a_ready_batch_is_trained_before_the_stop():
    with closing(open_async(lambda step: step, stop=lambda: True)) as batches:
        batches.weights_synced(0)
        wait_until(lambda: batches._ready)
        assert batches.take_batch(1) == 1


def test_close_interrupts_nothing_where_nothing_is_under_way():
    calls = []
    batches = open_async(lambda step: step, interrupt=lambda: calls.append(1))
    batches.weights_synced(0)
    wait_until(lambda: len(batches._ready) == 2 and not batches._making)
    batches.close()
    assert calls == [] and not batches._thread.is_alive()


def test_closing_abandons_a_batch_that_hangs(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    end = threading.Event()
    batches = open_async(lambda step: end.wait(SOON))
    batches.weights_synced(0)
    wait_until(lambda: batches._making)
    batches.close()  # returns
    end.set()
    batches._thread.join(SOON)


def test_the_counters_say_who_waited_for_whom():
    slow = 0.3
    with closing(open_async(lambda step: time.sleep(slow), max_staleness=1)) as batches:
        batches.weights_synced(0)
        batches.take_batch(1)
        metrics = batches.wait_metrics()
        assert metrics["time/wait_for_rollouts_s"] > slow / 2 > metrics["time/wait_for_trainer_s"]
        assert metrics["rollout/ready_batches"] == 0
        wait_until(lambda: batches._ready and not batches._making)
        time.sleep(slow)
        batches.take_batch(2)
        metrics = batches.wait_metrics()
        assert metrics["time/wait_for_trainer_s"] > slow / 2 > metrics["time/wait_for_rollouts_s"]
        assert metrics["rollout/ready_batches"] == 1
        assert 0.0 < metrics["rollout/overlap_frac"] < 1.0  # batch 2 was made beside, then nothing
        time.sleep(slow)
        batches.weights_synced(1)
        wait_until(lambda: batches._making)  # idle till then, and at work when it is counted
        assert batches.wait_metrics()["time/wait_for_trainer_s"] > slow / 2


def test_synchronous_batches_are_made_on_request():
    begun = []
    with closing(
        SyncRollouts(lambda step: begun.append(step) or (step, threading.get_ident()))
    ) as turn:
        turn.weights_synced(0)
        assert begun == []
        assert turn.take_batch(1) == (1, threading.get_ident()) and begun == [1]
        with turn.paused():
            assert turn.wait_metrics() == {}
