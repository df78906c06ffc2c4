# SPDX-License-Identifier: Apache-2.0
"""The run folder while a run trains in it: it stays, and it is not everybody's to write."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.config import ConfigError
from tests.jaxmoe.scripted import Run, Scripted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_removed_run_folder_ends_the_run(tmp_path, made_anew):
    work = tmp_path / "run"

    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 2:
            shutil.rmtree(work)
            if made_anew:  # by a second run, which writes its own
                work.mkdir()
                (work / "metrics.jsonl").write_text("")

    with pytest.raises(
        ConfigError, match=r"the run folder must not be removed .*run was removed"
    ) as error:
        Run(work, Scripted(script), changes=("save.every_steps=1",))()
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in work.iterdir()) == ["metrics.jsonl"] if made_anew else True
    assert not (work / "checkpoints").exists()


WRITES = """
import sys
from jaxmoe.cli import parse_config
parse_config(["--config", "tiny.py"], "Test.")
open(sys.argv[1], "w").close()
"""


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_files_of_commands_are_not_world_writable(tmp_path, umask, mode):
    file = tmp_path / "file"
    command = [sys.executable, "-c", WRITES, str(file)]
    subprocess.run(command, cwd=ROOT, umask=umask, check=True, env=os.environ, timeout=120)
    assert stat.S_IMODE(file.stat().st_mode) == mode
