# SPDX-License-Identifier: Apache-2.0
"""Other people's text on a terminal says what it says and does nothing."""

import pytest

from jaxmoe.cli import ExitStatus
from jaxmoe.config import ConfigError
from jaxmoe.observe.printable import escape_unprintable


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain, naïve, 数学\n\tof two lines", "plain, naïve, 数学\n\tof two lines"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("ok\roverwritten\x08", "ok\\roverwritten\\x08"),
        ("a\u202eb\x9b31m", "a\\u202eb\\x9b31m"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_written_out(text, escaped):
    assert escape_unprintable(text) == escaped


def test_a_hostile_row_in_an_error_is_escaped(capsys):
    with ExitStatus() as status:
        raise ConfigError("row 3 must be a question, got \x1b]52;c;aGk=\x07")
    assert status.code == 2
    assert capsys.readouterr().err == "error: row 3 must be a question, got \\x1b]52;c;aGk=\\x07\n"
