# SPDX-License-Identifier: Apache-2.0
"""Weights in shared memory: nothing stays behind, whoever was killed, and nobody else looks in."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from weight_updates import CFG, random_params

from jaxmoe.config import ConfigError
from jaxmoe.weight_sync import remove_when_killed
from jaxmoe.weight_sync.directory import WeightsDirectory
from jaxmoe.weight_sync.files import write_files

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


def test_closing_an_engine_removes_only_its_folder(tmp_path):
    first, second = WeightsDirectory(tmp_path, "a"), WeightsDirectory(tmp_path, "b")
    for run in "ab":
        (tmp_path / f"jaxmoe-{run}" / "1").mkdir(parents=True)
    first.close()
    assert names(tmp_path) == ["jaxmoe-b", "jaxmoe-b.lock"]
    first.close()
    second.close()
    assert names(tmp_path) == []


@contextmanager
def holder(directory, code=HOLD):
    """A process that has the folder of the run "killed" open and is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def soon(condition):
    """Return True if the condition holds within 20 seconds."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_the_remover_deletes_a_killed_runs_folder(tmp_path):
    with holder(tmp_path) as process:
        assert names(tmp_path) == ["jaxmoe-killed", "jaxmoe-killed.lock"]
        os.kill(process.pid, signal.SIGKILL)
        assert soon(lambda: names(tmp_path) == [])


def test_the_next_run_removes_only_abandoned_folders(tmp_path):
    without_remover = HOLD.replace("import sys, time", "import sys, time\nsys.executable = ''")
    with holder(tmp_path, without_remover) as process:
        WeightsDirectory(tmp_path, "next").close()
        assert names(tmp_path) == ["jaxmoe-killed", "jaxmoe-killed.lock"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        WeightsDirectory(tmp_path, "next").close()
        assert names(tmp_path) == []


def test_the_remover_spares_a_reopened_folder(tmp_path):
    lock = tmp_path / "jaxmoe-a.lock"
    with open(lock, "x") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        remover = subprocess.Popen([sys.executable, "-I", "-S", remove_when_killed.__file__, lock])
        opened = Path(f"/proc/{remover.pid}/fd")
        assert soon(lambda: str(lock) in map(os.path.realpath, opened.iterdir()))
        lock.unlink()
        lock.touch()
        lock.with_suffix("").mkdir()
    assert remover.wait(timeout=20) == 0
    assert names(tmp_path) == ["jaxmoe-a", "jaxmoe-a.lock"]


def test_no_process_outlives_a_closed_folder(tmp_path):
    directory = WeightsDirectory(tmp_path, "a")
    command = str(tmp_path / "jaxmoe-a.lock").encode()
    assert soon(lambda: any(command in line for line in command_lines()))
    directory.close()
    assert not any(command in line for line in command_lines())


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


def test_an_unwritable_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="weights_dir .* must be writable.* Try --set"):
        WeightsDirectory(tmp_path / "file", "a")


VISITOR_SCRIPT = """
import os, sys
os.setuid(65534)
seen = []
for root, _, files in os.walk(sys.argv[1]):
    seen += [(name, len(open(os.path.join(root, name), "rb").read())) for name in files]
print(seen)
"""


def test_another_user_reads_no_weight(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as shared:  # as everybody's as /dev/shm
        os.chmod(shared, 0o1777)
        before = os.umask(0)
        try:
            with write_files(
                random_params(), CFG, shared, dtype="float32", run="ab", version=1
            ) as update:
                file = Path(update.update_info["path"]) / "model.safetensors"
                result = subprocess.run(
                    [sys.executable, "-c", VISITOR_SCRIPT, shared],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                assert result.stdout == "[]\n"
                assert file.stat().st_mode & 0o777 == 0o600
        finally:
            os.umask(before)


@pytest.mark.parametrize("create", ["open", "link"])
def test_shared_folders_of_others_are_not_written_into(tmp_path, create):
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "jaxmoe-ab"
    elsewhere.mkdir(mode=0o700)
    place.symlink_to(elsewhere) if create == "link" else place.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="jaxmoe-ab exists and other users may enter it"):
        write_files(random_params(), CFG, tmp_path, dtype="float32", run="ab", version=1)
    assert names(elsewhere) == [] and place.exists()


def test_a_link_as_a_lock_is_not_followed(tmp_path):
    victim, run_dir = tmp_path / "victim", tmp_path / "jaxmoe-x"
    victim.write_text("mine")
    run_dir.mkdir()
    (tmp_path / "jaxmoe-x.lock").symlink_to(victim)
    (tmp_path / "jaxmoe-b.lock").symlink_to(victim)
    WeightsDirectory(tmp_path, "a").close()
    assert victim.read_text() == "mine" and run_dir.is_dir()
    with pytest.raises(ConfigError, match="weights_dir"):
        WeightsDirectory(tmp_path, "b")
    assert victim.read_text() == "mine"
