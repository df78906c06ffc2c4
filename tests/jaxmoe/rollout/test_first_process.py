# SPDX-License-Identifier: Apache-2.0
"""Batches of the first process reach all, here threads; so do its errors and its stop."""

import json
from contextlib import closing

import pytest
from board import as_processes

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.rollout.async_rollouts import AsyncRollouts
from jaxmoe.rollout.first_process import FirstProcessGroups, FirstProcessRollouts, GroupSaver


def open_first(channel, make, *, stop=bool, kind=FirstProcessRollouts, rollouts=AsyncRollouts):
    own = None
    if channel.number == 0:
        options = dict(first=1, last=4, max_staleness=1, stop=stop, interrupt=bool)
        own = rollouts(make, **options)
    return kind(own, lambda batch: json.dumps(batch).encode(), json.loads, channel=channel)


def test_all_processes_take_the_batches_of_the_first():
    def process(channel):
        made = []
        with closing(open_first(channel, lambda step: made.append(step) or [step])) as rollouts:
            taken = []
            rollouts.weights_synced(0)
            for step in range(1, 5):
                taken.append(rollouts.take_batch(step))
                with rollouts.paused():
                    channel.gather_values(step)
                rollouts.weights_synced(step)
            assert bool(rollouts.wait_metrics()) == bool(made) == (channel.number == 0)
        return taken

    assert as_processes(3, process) == [[[1], [2], [3], [4]]] * 3


@pytest.mark.parametrize("raised", [ConfigError("it must be so"), EngineError("gone")])
def test_an_error_of_the_first_ends_all(raised):
    def make(step):
        raise raised

    def process(channel):
        with closing(open_first(channel, make)) as rollouts:
            rollouts.weights_synced(0)
            rollouts.take_batch(1)

    for error in as_processes(2, process):
        assert type(error) is type(raised) and str(raised) in str(error)


def test_a_stop_of_the_first_stops_all():
    def process(channel):
        with closing(open_first(channel, lambda step: step, stop=lambda: True)) as rollouts:
            return rollouts.take_batch(1)  # no weights are loaded, so it is not made

    assert as_processes(2, process) == [None, None]


class Saving(AsyncRollouts):
    def save(self, step):
        return {"draws": step}, b"two\nlines"

    def settle(self, step):
        pass


def test_all_processes_save_the_groups_of_the_first():
    def process(channel):
        options: dict = dict(kind=FirstProcessGroups, rollouts=Saving)
        with closing(open_first(channel, lambda step: step, **options)) as rollouts:
            assert isinstance(rollouts, GroupSaver)
            rollouts.settle(3)
            return rollouts.save(3)

    assert as_processes(2, process) == [({"draws": 3}, b"two\nlines")] * 2
    assert not issubclass(FirstProcessRollouts, GroupSaver)
