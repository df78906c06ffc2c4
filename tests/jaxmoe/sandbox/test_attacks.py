# SPDX-License-Identifier: Apache-2.0
"""No attack gets what it looks for; without the measures that stop it, each of them does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.sandbox.bubblewrap import find_bubblewrap
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.process import SandboxError
from tests.jaxmoe.sandbox.attacks import ATTACKS, PRELUDE
from tests.jaxmoe.sandbox.kernel_attacks import KERNEL_ATTACKS, KERNEL_PRELUDE
from tests.jaxmoe.sandbox.kinds import KINDS, require_kind
from tests.jaxmoe.sandbox.run_attacks import ALL_ATTACKS, ARGUMENT, copy_interpreter

ROOT = Path(__file__).parents[3]
USERS = ("root", "nobody") if os.getuid() == 0 else ("nobody",)
MODULE = "tests.jaxmoe.sandbox.run_attacks"
# An output that says that the program itself is wrong, and attacked nothing; so does a descriptor
# that is closed, or one too many where the attack is not about that.
MISTAKES = (
    "NameError",
    "SyntaxError",
    "ArgumentError",
    "AttributeError",
    "TypeError",
    "timeout",
    "Errno 9]",
    "Errno 24]",
)


def run_attacks(kind, user, which):
    """The output of each attack, by name."""
    require_kind(kind)
    drop = user == "nobody" and os.getuid() == 0
    if drop and (private := find_private_folder()):
        pytest.skip(f"nobody cannot read {private}: chmod o+x {private}")
    done = subprocess.run(
        [sys.executable, "-m", MODULE, kind, "nobody" if drop else "same", which, ARGUMENT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "SECRET_ENV": "trainer-secret-8151"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def find_private_folder():
    """The first folder above the checkout or bubblewrap that other users cannot enter, or None."""
    paths = [ROOT / "tests", *filter(None, [find_bubblewrap()])]
    folders = {parent for path in paths for parent in Path(path).parents}
    return next((x for x in sorted(folders) if not x.stat().st_mode & 0o001), None)


def test_there_are_enough_attacks_of_different_names():
    assert len({attack.name for attack in ALL_ATTACKS}) == len(ALL_ATTACKS)
    assert len(ATTACKS) >= 60 and len(KERNEL_ATTACKS) >= 60


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_is_contained(kind, user):
    outputs = run_attacks(kind, user, "contained")
    assert outputs.keys() == {attack.name for attack in ALL_ATTACKS}
    assert not [name for name, output in outputs.items() if "TAKEN" in output]
    del outputs["many descriptors"]
    wrong = {name: x for name, x in outputs.items() if any(word in x for word in MISTAKES)}
    assert not wrong


@pytest.mark.slow  # half a minute: a sandbox for each set of measures
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_succeeds_without_the_measures_that_stop_it(kind, user):
    outputs = run_attacks(kind, user, "controls")
    assert len(outputs) >= 120
    assert not {name: x for name, x in outputs.items() if "TAKEN" not in x}


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_no_signal_leaves_where_landlock_restricts_none(user):
    """Before its version 6, as Linux 6.2 to 6.11 have it, Landlock lets signals out."""
    outputs = run_attacks("landlock", user, "without_landlock")
    signals = [name for name in outputs if "signal" in name]
    assert len(signals) > 10 and not [name for name in signals if "TAKEN" in outputs[name]]


def test_an_attack_without_a_control_says_why():
    for attack in ALL_ATTACKS:
        for stops in (attack.bubblewrap, attack.landlock):
            assert len(stops) > 20 if isinstance(stops, str) else stops


TAKE_LEASES = """
import glob
files = []
for name in ('json', 'types', 'ast', 'linecache', 'traceback', 'tokenize'):
    for path in [f'{LIBRARY}/{name}.py', *glob.glob(f'{LIBRARY}/__pycache__/{name}.*.pyc')]:
        try: files.append(os.open(path, 0)); fcntl.fcntl(files[-1], 1024, fcntl.F_WRLCK)
        except OSError: pass
"""


@pytest.mark.slow  # a copy of the interpreter for each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("removed", [(), ("file_commands",)])
def test_leases_of_one_sandbox_stop_no_other(kind, removed):
    """Where fcntl is not filtered, the next interpreter waits 45 s for the first."""
    require_kind(kind)
    config = SandboxConfig(disk_mb=0)
    with copy_interpreter() as python:  # a lease on another one would stop the whole machine
        launchers = [Launcher(kind, config, frozenset(names)) for names in (removed, ())]
        for launcher in launchers:
            vars(launcher)["interpreter"] = python
        first = launchers[0].start()
        first.wait_ready()
        assert first.run(PRELUDE + KERNEL_PRELUDE + TAKE_LEASES, 20.0).output == ""
        second = launchers[1].start()
        try:
            if removed:
                with pytest.raises(SandboxError):
                    second.wait_ready(1.0)
            else:
                second.wait_ready()
        finally:
            first.kill()
            second.kill()
