# SPDX-License-Identifier: Apache-2.0
"""Which of the processes answer."""

from contextlib import ExitStack

import pytest

from jaxmoe.distributed import processes, roll_call
from jaxmoe.distributed.roll_call import answering_roll_calls, find_lost_processes


class Service:
    """The calls of jax's coordination service that a roll call makes."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [pair for pair in list(self.values.items()) if pair[0].startswith(f"{folder}/")]


class EndedService(Service):
    def key_value_set(self, key, value, allow_overwrite=False):
        raise RuntimeError("UNAVAILABLE: Socket closed")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(roll_call, "ANSWER_S", 0.5)
    monkeypatch.setattr(roll_call, "_PAUSE_S", 0.01)


@pytest.mark.parametrize("living", [{1, 2, 3}, {1, 3}, set()])
def test_processes_without_an_answer_are_lost(quick, living):
    service = Service()
    with ExitStack() as stack:
        for number in living:
            stack.enter_context(answering_roll_calls(service, number))
        assert find_lost_processes(service, 0, 4) == sorted({1, 2, 3} - living)


def test_the_first_process_is_lost_with_its_service(quick):
    assert find_lost_processes(EndedService(), 2, 3) == [0]


def test_one_process_asks_nobody():
    with answering_roll_calls():
        assert find_lost_processes() == []


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ([2], "process 0 of 4 lost the connection to process 2: UNKNOWN: Gloo. .*log of process 2"),
        ([1, 3], "lost the connection to processes 1, 3: "),
        ([], "failed in a computation of all processes, and the others live: UNKNOWN: Gloo"),
    ],
)
def test_a_failed_collective_names_the_lost_processes(monkeypatch, lost, message):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 4)
    monkeypatch.setattr(processes, "find_lost_processes", lambda: lost)
    # jax raises a ValueError where an array is read whose computation failed
    with pytest.raises(processes.EngineError, match=message) as error:
        with processes.joined_processes():
            raise ValueError("UNKNOWN: Gloo\nmore")
    assert "\n" not in str(error.value)


def test_errors_of_other_kinds_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 4)
    for error in (ValueError("UNKNOWN word"), processes.ConfigError("UNKNOWN: x"), OSError("x")):
        assert not processes.is_failed_collective(error)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 1)
    assert not processes.is_failed_collective(ValueError("UNKNOWN: Gloo"))
