# SPDX-License-Identifier: Apache-2.0
"""No attack gets what it looks for; without the measures that stop it, each of them does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.envs.sandbox.bubblewrap import find_bubblewrap
from tests.jaxmoe.envs.sandbox.attacks import ATTACKS
from tests.jaxmoe.envs.sandbox.kinds import KINDS, require_kind
from tests.jaxmoe.envs.sandbox.run_attacks import ARGUMENT

ROOT = Path(__file__).parents[4]
USERS = ("root", "nobody") if os.getuid() == 0 else ("nobody",)
MODULE = "tests.jaxmoe.envs.sandbox.run_attacks"
# An output that says that the program itself is wrong, and attacked nothing.
MISTAKES = ("NameError", "SyntaxError", "ArgumentError", "TypeError", "timeout")


def run_attacks(kind, user, which):
    """The output of each attack, by name."""
    require_kind(kind)
    drop = user == "nobody" and os.getuid() == 0
    if drop and (private := find_private_folder()):
        pytest.skip(f"nobody cannot read {private}: chmod o+x {private}")
    done = subprocess.run(
        [sys.executable, "-m", MODULE, kind, "nobody" if drop else "same", which, ARGUMENT],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "SECRET_ENV": "trainer-secret-8151"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def find_private_folder():
    """The first folder above the checkout or bubblewrap that other users cannot enter, or None."""
    paths = [ROOT / "tests", *filter(None, [find_bubblewrap()])]
    folders = {parent for path in paths for parent in Path(path).parents}
    return next((x for x in sorted(folders) if not x.stat().st_mode & 0o001), None)


def test_there_are_more_than_sixty_attacks_of_different_names():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_is_contained(kind, user):
    outputs = run_attacks(kind, user, "contained")
    assert outputs.keys() == {attack.name for attack in ATTACKS}
    assert not [name for name, output in outputs.items() if "TAKEN" in output]
    wrong = {name: x for name, x in outputs.items() if any(word in x for word in MISTAKES)}
    assert not wrong


@pytest.mark.slow  # half a minute: a sandbox for each set of measures
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_succeeds_without_the_measures_that_stop_it(kind, user):
    outputs = run_attacks(kind, user, "controls")
    assert len(outputs) >= 60
    assert not {name: x for name, x in outputs.items() if "TAKEN" not in x}


def test_an_attack_without_a_control_says_why():
    for attack in ATTACKS:
        for stops in (attack.bubblewrap, attack.landlock):
            assert len(stops) > 20 if isinstance(stops, str) else stops
