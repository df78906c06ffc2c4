# SPDX-License-Identifier: Apache-2.0
"""Words between processes, without a device: whole, in order, errors too, and nothing stays."""

import pytest
from board import Board, as_processes

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.parallel import channel as module
from jaxmoe.parallel.channel import Channel


def test_what_the_first_makes_is_everybodys_and_only_it_makes_it(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 10)
    board, made = Board(3), []

    def process(channel):
        def make(data=bytes(range(256))):
            made.append(channel.number)
            return data

        return [channel.from_first(make), channel.from_first(lambda: b""), channel.everyones(
            {"number": channel.number}
        )]  # fmt: skip

    others = [{"number": i} for i in range(3)]
    assert as_processes(3, process, board) == 3 * [[bytes(range(256)), b"", others]]
    assert made == [0] and board.said == {} and board.largest <= 10


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (ConfigError("weights_dir is full"), ConfigError, "weights_dir is full"),
        (EngineError("nobody answers"), EngineError, "process 0: nobody answers"),
        (KeyError("a"), EngineError, "process 0: KeyError: 'a'"),
    ],
)
def test_an_error_of_the_first_ends_all_with_its_cause(raised, kind, said):
    def process(channel):
        def make():
            raise raised

        return channel.from_first(make)

    first, *others = as_processes(3, process)
    assert first is raised
    assert all(type(error) is kind and str(error) == said for error in others)


def test_an_error_of_another_ends_all(monkeypatch):
    def process(channel):
        return channel.by_all(lambda: 1 // (channel.number - 2))

    zero, one, two = as_processes(3, process)
    assert isinstance(two, ZeroDivisionError)
    for error in (zero, one):
        assert isinstance(error, EngineError) and "process 2: ZeroDivisionError" in str(error)


def test_one_process_needs_nobody():
    alone = Channel("alone")
    assert alone.from_first(lambda: b"x") == b"x" and alone.everyones(1) == [1]


def test_channels_of_two_names_do_not_hear_each_other():
    def process(channel):
        other = Channel("other", client=channel._client, number=channel.number, count=2)
        return [x.everyones([name, channel.number]) for name, x in (("a", channel), ("b", other))]

    heard = [[[name, 0], [name, 1]] for name in ("a", "b")]
    assert as_processes(2, process) == [heard, heard]


def test_a_message_is_as_small_as_grpc_takes_it():
    assert module.PIECE_BYTES < 4 * 2**20
