# SPDX-License-Identifier: Apache-2.0
"""Programs kept between runs of the tests: only complete ones, and each run has its own folder."""

import os
import zlib

import jax
from jax._src.compiler import get_compile_options

from tests import kept_programs
from tests.kept_programs import keep_programs, link_kept_programs, open_programs, read_program


def test_the_next_run_has_only_complete_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_programs, "LINKED_BYTES", 10)
    small = zlib.compress(b"")
    run = open_programs(tmp_path)
    link_kept_programs(tmp_path, run / "gw0")
    program = zlib.compress(b"instructions " * 100)
    (run / "gw0" / "a-cache").write_bytes(program)
    (run / "gw0" / "b-cache").write_bytes(program[:-5])
    (run / "c-cache").write_bytes(program)
    (run / "d-cache").write_bytes(small)
    keep_programs(tmp_path, run)
    assert not run.exists()
    second = open_programs(tmp_path)
    link_kept_programs(tmp_path, second / "gw1")
    assert sorted(os.listdir(second / "gw1")) == ["a-cache", "c-cache"]
    assert (second / "gw1" / "a-cache").read_bytes() == program
    read = [read_program(None, lambda *_: None, str(tmp_path), name) for name in "abcd"]
    assert read == [program, None, program, small]


def test_two_runs_at_once_keep_both(tmp_path):
    runs = [open_programs(tmp_path) for _ in range(2)]
    for run, names in zip(runs, ("ab", "bc"), strict=True):
        for name in names:
            (run / f"{name}-cache").write_bytes(zlib.compress(b"program"))
    for run in runs:
        keep_programs(tmp_path, run)
    assert sorted(os.listdir(tmp_path / "kept")) == ["a-cache", "b-cache", "c-cache"]


def test_kept_programs_and_abandoned_runs_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_programs, "MAX_KEPT_BYTES", 10)
    abandoned = open_programs(tmp_path)
    (tmp_path / "kept" / "a-cache").write_bytes(b"more than ten bytes")
    os.utime(abandoned, (0, 0))
    run = open_programs(tmp_path)
    assert not abandoned.exists() and run.exists() and not os.listdir(tmp_path / "kept")


def test_a_program_has_one_name_in_all_folders():
    """jax names a program by its options. Where they name the folder, no later run reads it."""
    options = get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString()
    assert (jax.config.jax_compilation_cache_dir or "no folder").encode() not in options
