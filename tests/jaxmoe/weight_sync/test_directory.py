# SPDX-License-Identifier: Apache-2.0
"""Weights in shared memory: nothing stays behind, whoever was killed."""

import os
import signal
import subprocess
import sys

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.weight_sync.directory import WeightsDirectory

HOLD = """
import sys, time
from jaxmoe.weight_sync.directory import WeightsDirectory
home = WeightsDirectory(sys.argv[1], "killed")
(__import__("pathlib").Path(sys.argv[1]) / "jaxmoe-killed" / "3").mkdir(parents=True)
print("held", flush=True)
time.sleep(100)
"""


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def test_the_folder_goes_with_its_engine_and_others_stay(tmp_path):
    first, second = WeightsDirectory(tmp_path, "a"), WeightsDirectory(tmp_path, "b")
    for run in "ab":
        (tmp_path / f"jaxmoe-{run}" / "1").mkdir(parents=True)
    first.close()
    assert names(tmp_path) == ["jaxmoe-b", "jaxmoe-b.lock"]
    first.close()
    second.close()
    assert names(tmp_path) == []


def test_what_a_killed_run_left_is_removed_by_the_next_and_not_while_it_lives(tmp_path):
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    WeightsDirectory(tmp_path, "next").close()
    assert names(tmp_path) == ["jaxmoe-killed", "jaxmoe-killed.lock"]
    os.kill(held.pid, signal.SIGKILL)
    held.wait()
    held.stdout.close()
    WeightsDirectory(tmp_path, "next").close()
    assert names(tmp_path) == []


def test_a_place_that_takes_nothing_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="weights_dir .* must take the weights.* Try --set"):
        WeightsDirectory(tmp_path / "file", "a")
