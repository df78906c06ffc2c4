# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe` lists the commands."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import jaxmoe
from jaxmoe.__main__ import COMMANDS, main

FOLDER = Path(jaxmoe.__file__).parent


def test_every_command_has_a_line(capsys):
    files = [*FOLDER.glob("[!_]*.py"), *FOLDER.glob("*/__main__.py")]
    commands = [f for f in files if 'if __name__ == "__main__":' in f.read_text()]
    names = {f.parent.name if f.name == "__main__.py" else f.stem for f in commands}
    assert names == COMMANDS.keys()
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, text in COMMANDS.items():
        assert find_spec(f"jaxmoe.{name}") is not None
        assert any(f"python -m jaxmoe.{name}" in line and text in line for line in lines)


@pytest.mark.parametrize(
    ("typed", "code", "answer"),
    [
        (["--version"], 0, f"jaxmoe {jaxmoe.__version__}\n"),
        (["train", "--config", "a.py"], 2, "Type python -m jaxmoe.train --config a.py\n"),
        (["trian"], 2, "unrecognized arguments: trian\n"),
    ],
)
def test_other_words_end_with_what_to_type(typed, code, answer, capsys):
    with pytest.raises(SystemExit) as end:
        main(typed)
    assert end.value.code == code
    output = capsys.readouterr()
    assert (output.out + output.err).endswith(answer)
