# SPDX-License-Identifier: Apache-2.0
"""Writes into a run folder: no link is followed, no two writers meet, a refusal is one line."""

import errno
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmoe import run_files, samples
from jaxmoe.checkpoint.run import LOCK, lock_run_folder
from jaxmoe.config import ConfigError
from jaxmoe.observe import metrics
from jaxmoe.observe.metrics import MetricsLog, read_samples
from jaxmoe.observe.plots import plot_run
from jaxmoe.run_files import (
    RunFolderError,
    append_bytes,
    open_to_append,
    replace_file,
    replace_text,
)

KEYS = "ssh-ed25519 AAAA the owner's key\n"


def log_a_step(run: Path) -> None:
    with MetricsLog(run, stage="rl", step=1) as log:
        log.write("rl", 2, {"loss": 1.0})


WRITERS = {
    "metrics.jsonl": log_a_step,
    "samples.jsonl": log_a_step,
    "samples.html": lambda run: samples.show_samples(run),
    "tracker_id": lambda run: replace_text(run / "tracker_id", "0"),
    "plots": lambda run: plot_run([], run, panels=False),
    "tensorboard": log_a_step,
    "tensorboard/rl": log_a_step,
    LOCK: lambda run: lock_run_folder(run).__enter__(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_the_run_folder_is_refused(tmp_path, name):
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / name).parent.mkdir(parents=True)
    (run / "samples.jsonl").write_text(
        '{"stage": "rl", "step": 1, "response": "ssh-ed25519 eve"}\n'
    )
    (run / name).unlink(missing_ok=True)
    folder = name in ("plots", "tensorboard", "tensorboard/rl")
    victim.mkdir() if folder else victim.write_text(KEYS)
    (run / name).symlink_to(victim)
    with pytest.raises(ConfigError) as error:
        WRITERS[name](run)
    assert str(run / name) in str(error.value) and "\n" not in str(error.value)
    assert list(victim.iterdir()) == [] if folder else victim.read_text() == KEYS


@pytest.mark.parametrize("old", ["samples.tmp", "metrics.tmp", "config.json.tmp", ".lock"])
def test_links_at_predictable_names_are_not_written_through(tmp_path, old):
    victim = tmp_path / "victim"
    victim.write_text(KEYS)
    run = tmp_path / "run"
    run.mkdir()
    (run / old).symlink_to(victim)
    log_a_step(run)
    (run / "samples.jsonl").write_text('{"stage": "rl", "step": 1, "response": "eve"}\n')
    samples.show_samples(run)
    assert victim.read_text() == KEYS


def test_the_lock_file_keeps_what_it_holds(tmp_path):
    (tmp_path / LOCK).write_text("somebody's note")
    with lock_run_folder(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == "somebody's note"


PAGES = """
import sys
from pathlib import Path
from jaxmoe import samples
run = Path(sys.argv[1])
print("ready", flush=True)
while not (run / "done").exists():
    samples.show_samples(run)
"""


def test_forty_rewrites_beside_a_page_lose_nothing(tmp_path, monkeypatch):
    """The page is made over and over by a process of its own."""
    monkeypatch.setattr(metrics, "MAX_SAMPLES_BYTES", 20_000)
    row = {"response": "x" * 4_000}
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write_samples("rl", 0, [row])
        with subprocess.Popen(
            [sys.executable, "-c", PAGES, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.PIPE,
        ) as pages:
            assert pages.stdout is not None and pages.stdout.readline() == "ready\n"
            drain = subprocess.Popen(["cat"], stdin=pages.stdout, stdout=subprocess.DEVNULL)
            size, rewrites, step = 0, 0, 0
            while rewrites < 40:
                step += 1
                log.write_samples("rl", step, [row])
                assert pages.poll() is None
                steps = [r["step"] for r in read_samples(tmp_path / "samples.jsonl")]
                assert steps[0] == 0 and steps[-1] == step and steps == sorted(set(steps))
                new_size = (tmp_path / "samples.jsonl").stat().st_size
                rewrites, size = rewrites + (new_size < size), new_size
            (tmp_path / "done").touch()
            assert pages.stderr is not None and pages.stderr.read() == ""
            assert pages.wait(60) == 0 and drain.wait(60) == 0
    assert "<h1>Samples of" in (tmp_path / "samples.html").read_text()
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_an_unfinished_file_leaves_the_old_one(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("old")
    with pytest.raises(KeyError), replace_file(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["config.json"]


def test_two_writers_of_a_file_have_two_temporaries(tmp_path):
    path = tmp_path / "page"
    with replace_file(path) as first, replace_file(path) as second:
        first.write(b"1")
        second.write(b"2")
        assert len(os.listdir(tmp_path)) == 2
    assert path.read_bytes() == b"1"


def test_temporaries_of_killed_writers_are_removed_later(tmp_path):
    old, new = (tmp_path / f".samples.html.{digit * 16}.tmp" for digit in "ab")
    notes = tmp_path / ".notes.tmp"
    for path in (old, new, notes):
        path.touch()
        os.utime(path, (time.time() - 7200,) * 2)
    new.touch()
    run_files.remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([notes, new])


def test_files_are_never_writable_by_everybody(tmp_path):
    before = os.umask(0)
    try:
        replace_text(tmp_path / "a", "")
        open_to_append(tmp_path / "b").close()
        with lock_run_folder(tmp_path):
            pass
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o664] * 3


class Faulty(io.FileIO):
    """A file on a disk that fails, or takes three bytes at a time."""

    number = 0

    def write(self, content):
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(bytes(content[:3]))


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "EFBIG", "EACCES"])
def test_any_disk_error_is_one_line_with_file(tmp_path, name):
    with Faulty(tmp_path / "metrics.jsonl", "w") as file:
        file.number = getattr(errno, name)
        with pytest.raises(RunFolderError) as error:
            append_bytes(file, b"line\n")
    message = str(error.value)
    assert f"{tmp_path}/metrics.jsonl" in message and "\n" not in message
    assert os.strerror(file.number) in message


def test_a_write_in_parts_is_complete(tmp_path):
    with Faulty(tmp_path / "a", "w") as file:
        append_bytes(file, b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
