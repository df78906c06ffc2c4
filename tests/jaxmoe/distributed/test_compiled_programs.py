# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept between runs: where, for whom, and how many."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import pytest

from jaxmoe.distributed import compiled_programs
from jaxmoe.distributed.compiled_programs import identify_processor, keep_compiled_programs

# A process that compiles one program and prints how often the cache had one, and had none.
COUNTS = """
import jax
from jaxmoe.distributed.compiled_programs import keep_compiled_programs
line = keep_compiled_programs()
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
double = jax.jit(lambda x: x @ x + 2.0)
assert float(double(jax.numpy.full((3, 3), 2.0))[0, 0]) == 14.0
print(events.count("cache_hits"), events.count("cache_misses"), line, sep="|")
"""


@pytest.fixture
def settings(monkeypatch):
    """What keep_compiled_programs sets, in place of setting it in this process."""
    changes = {}
    monkeypatch.setattr(jax.config, "update", changes.__setitem__)
    return changes


@pytest.fixture
def programs(tmp_path, settings):
    """The folder of this processor's programs below tmp_path."""
    keep_compiled_programs({"XDG_CACHE_HOME": str(tmp_path)})
    return Path(settings["jax_compilation_cache_dir"])


def write_program(folder: Path, name: str, used_at: float, n_bytes: int = 100) -> Path:
    path = folder / f"{name}-cache"
    path.write_bytes(zlib.compress(os.urandom(n_bytes)))
    os.utime(path, (used_at, used_at))
    return path


@pytest.mark.parametrize(
    "environ",
    [
        {"JAX_COMPILATION_CACHE_DIR": "/shared/programs"},
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        {"JAX_ENABLE_COMPILATION_CACHE": "0"},
        {"JAX_NUM_PROCESSES": "4"},
        {"JAXMOE_PROCESSES": "auto"},
    ],
)
def test_the_environment_turns_keeping_off(environ, tmp_path, settings):
    assert keep_compiled_programs(environ | {"XDG_CACHE_HOME": str(tmp_path)}) is None
    assert not settings and not list(tmp_path.iterdir())


def test_each_processor_has_its_own_programs(tmp_path):
    one, other, same = (tmp_path / name for name in ("one", "other", "same"))
    one.write_text("model name : A\nflags : avx2\nbogomips : 4800.0\n")
    same.write_text("model name : A\nflags : avx2\nbogomips : 4801.2\n")
    other.write_text("model name : A\nflags : avx2 avx512f\nbogomips : 4800.0\n")
    assert identify_processor(one) == identify_processor(same) != identify_processor(other)


def test_the_least_recently_used_programs_go_first(programs, monkeypatch, tmp_path):
    old, new = (write_program(programs, name, used_at=at) for name, at in (("b", 10), ("a", 20)))
    monkeypatch.setattr(compiled_programs, "MAX_BYTES", new.stat().st_size)
    keep_compiled_programs({"XDG_CACHE_HOME": str(tmp_path)})
    assert new.exists() and not old.exists()


def test_what_a_killed_run_wrote_is_removed(programs, tmp_path):
    later = (programs / "checked").stat().st_mtime + 5
    complete = write_program(programs, "complete", used_at=later)
    cut = write_program(programs, "cut", used_at=later)
    cut.write_bytes(cut.read_bytes()[:-20])
    os.utime(cut, (later, later))
    keep_compiled_programs({"XDG_CACHE_HOME": str(tmp_path)})
    assert complete.exists() and not cut.exists()


def test_programs_that_others_may_write_are_refused(programs, settings, tmp_path):
    settings.clear()
    programs.chmod(0o777)
    line = keep_compiled_programs({"XDG_CACHE_HOME": str(tmp_path)})
    assert line == f"programs are not kept: {programs} must be yours, and writable by you alone"
    assert not settings


def test_a_file_in_the_way_is_named(settings, tmp_path):
    (tmp_path / "jaxmoe").write_text("")
    line = keep_compiled_programs({"XDG_CACHE_HOME": str(tmp_path)})
    assert line is not None and str(tmp_path / "jaxmoe") in line and not settings


def test_a_second_start_reads_every_program(tmp_path):
    environ = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    environ |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    lines = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", COUNTS],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("|")
        for _ in range(2)
    ]
    (hits, misses, _), (later_hits, later_misses, line) = lines
    assert int(hits) == 0 and int(misses) > 0
    assert (later_hits, later_misses) == (misses, "0")
    assert "0.0 MB in" in line and str(tmp_path) in line
