# SPDX-License-Identifier: Apache-2.0
"""Words between processes, without a device: whole, in order, errors too, and nothing stays."""

import pytest
from board import Board, as_processes

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.distributed import channel as module
from jaxmoe.distributed.channel import Channel


def test_process_0_makes_values_for_all(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 10)
    board, calls = Board(3), []

    def run_process(channel):
        def make_data(data=bytes(range(256))):
            calls.append(channel.number)
            return data

        return [
            channel.broadcast_from_first(make_data),
            channel.broadcast_from_first(lambda: b""),
            channel.gather_values({"number": channel.number}),
        ]

    expected = [{"number": i} for i in range(3)]
    assert as_processes(3, run_process, board) == 3 * [[bytes(range(256)), b"", expected]]
    assert calls == [0] and board.values == {} and board.largest <= 10


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ConfigError("weights_dir is full"), ConfigError, "weights_dir is full"),
        (EngineError("nobody answers"), EngineError, "process 0: nobody answers"),
        (KeyError("a"), EngineError, "process 0: KeyError: 'a'"),
    ],
)
def test_an_error_of_process_0_ends_all(raised, kind, message):
    def run_process(channel):
        def make_data():
            raise raised

        return channel.broadcast_from_first(make_data)

    first, *expected = as_processes(3, run_process)
    assert first is raised
    assert all(type(error) is kind and str(error) == message for error in expected)


def test_an_error_of_another_ends_all(monkeypatch):
    def run_process(channel):
        return channel.gather_results(lambda: 1 // (channel.number - 2))

    zero, second_process, two = as_processes(3, run_process)
    assert isinstance(two, ZeroDivisionError)
    for error in (zero, second_process):
        assert isinstance(error, EngineError) and "process 2: ZeroDivisionError" in str(error)


def test_one_process_needs_nobody():
    single = Channel("alone")
    assert single.broadcast_from_first(lambda: b"x") == b"x" and single.gather_values(1) == [1]


def test_channels_of_different_names_are_separate():
    def run_process(channel):
        other_channel = Channel("other", client=channel._client, number=channel.number, count=2)
        return [
            x.gather_values([name, channel.number])
            for name, x in (("a", channel), ("b", other_channel))
        ]

    heard = [[[name, 0], [name, 1]] for name in ("a", "b")]
    assert as_processes(2, run_process) == [heard, heard]
