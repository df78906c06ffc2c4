# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` proves that its parts ran: its pieces, with a few small tests for the real ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CI = ROOT / ".ci"
PARTS = [
    line.split()
    for line in (CI / "least_passed.txt").read_text().splitlines()
    if not line.startswith("#")
]
TESTS = """
import pytest
def test_one(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_two(x): pass
def test_skipped(): pytest.skip("no such chip")
@pytest.mark.xfail(strict=True)
def test_expected_to_fail(): assert False
"""
# pip that refuses what the table of a lane asks for, and answers for the known package or not
PIP = """#!/usr/bin/env bash
case "$1 $*" in
  download*) exit $REGISTRY ;;
  *) exit $INSTALLS ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A root with this .ci/proof.sh, one part in the table, and a file of tests."""
    ci = tmp_path / "root" / ".ci"
    ci.mkdir(parents=True)
    for name in ("proof.sh", "passed.py"):
        (ci / name).write_text((CI / name).read_text())
    (ci / "least_passed.txt").write_text("# lane part landing all\nmain small 3 4\nvllm big - 1\n")
    (tmp_path / "root" / "test_small.py").write_text(TESTS)
    (tmp_path / "work").mkdir()
    return tmp_path


def shell(folder, line, everything="", **env):
    """The line as .ci/run would run it, in the root."""
    setting = f"set -euo pipefail; root=$PWD; work={folder}/work; all={everything}; . .ci/proof.sh"
    return subprocess.run(
        ["bash", "-c", f"{setting}\n{line}\necho went on"],
        cwd=folder / "root",
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
    )


SMALL = f"run_tests small {sys.executable} -m pytest -q -p no:cacheprovider"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """pytest's own report of TESTS."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "test_small.py").write_text(TESTS)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=small.xml"],
        cwd=folder,
        check=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    return (folder / "small.xml").read_text()


def keep(report, checkout):
    (checkout / "work/reports").mkdir(exist_ok=True)
    (checkout / "work/reports/small.xml").write_text(report)


def test_a_part_with_enough_tests_prints_their_number(checkout):
    completed = shell(checkout, f"{SMALL} test_small.py")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "part small: 3 tests passed, at least 3 must" in completed.stdout


@pytest.mark.parametrize("deselected", ["-k one", "-k 'one or skipped or expected'"])
def test_a_part_that_lost_tests_fails(checkout, deselected):
    completed = shell(checkout, f"{SMALL} test_small.py {deselected}")
    assert completed.returncode != 0 and "went on" not in completed.stdout
    assert "at least 3 tests must pass in part small, and 1 did" in completed.stderr


def test_skipped_and_expected_failures_did_not_pass(checkout):
    completed = shell(checkout, f"{SMALL} test_small.py", everything="all")
    assert (
        completed.returncode != 0 and "at least 4 tests must pass in part small" in completed.stderr
    )


def test_a_part_fails_with_its_tests(checkout):
    (checkout / "root/test_small.py").write_text(TESTS + "def test_wrong(): assert 0\n")
    completed = shell(checkout, f"{SMALL} test_small.py")
    assert completed.returncode == 1 and "went on" not in completed.stdout


@pytest.mark.parametrize("command", ['bash -euo pipefail -c ""', "true"])
def test_a_command_that_runs_no_test_fails(checkout, command):
    completed = shell(checkout, f"run_tests small {command}")
    assert completed.returncode != 0 and "went on" not in completed.stdout
    assert "part small must leave a report" in completed.stderr


@pytest.mark.parametrize("part", ["smal", "big"])
def test_a_part_without_a_number_fails(checkout, part):
    completed = shell(checkout, f"run_tests {part} true")
    assert completed.returncode != 0 and f"a number for the part {part}" in completed.stderr


def test_parts_that_never_ran_are_named(checkout, report):
    keep(report, checkout)
    completed = shell(checkout, "check_all_parts")
    assert completed.returncode == 0 and "all 1 parts ran" in completed.stdout
    check = "python3 .ci/passed.py parts .ci/least_passed.txt $work/reports all"
    completed = shell(checkout, check)
    assert completed.returncode != 0 and "parts that did not run: big" in completed.stderr
    completed = shell(checkout, f"touch $work/reports/vllm.skipped; {check}")
    assert completed.returncode == 0 and "but for the lane vllm" in completed.stdout


def test_tests_that_no_part_ran_are_listed(checkout, report):
    keep(report, checkout)
    (checkout / "ids").write_text(
        "test_small.py::test_one\ntest_small.py::test_two[1]\ntest_small.py::test_two[2]\n"
        "test_small.py::test_skipped\ntest_small.py::test_on_a_chip[a::b]\n\n5 tests collected\n"
    )
    (checkout / "chips").write_text("test_small.py::test_on_a_chip[a::b]\n")
    check = f"python3 .ci/passed.py missing $work/reports {checkout}/ids {checkout}/chips"
    completed = shell(checkout, check)
    assert completed.returncode == 0, completed.stderr
    assert "5 tests collected, 2 of them passed in no part" in completed.stdout
    assert (
        "1 needs a GPU or a TPU" in completed.stdout
        and "1 skipped: no such chip" in completed.stdout
    )
    (checkout / "ids").write_text("test_small.py::test_one\ntest_launch.py::test_forgotten[x]\n")
    completed = shell(checkout, check)
    assert completed.returncode != 0 and "test_launch.py::test_forgotten[x]" in completed.stderr


def test_a_missing_readme_command_fails_the_run(checkout):
    text = (ROOT / "README.md").read_text()
    completed = shell(checkout, f"readme_command {ROOT}/README.md")
    assert "-m pytest -q -n 2 --dist loadfile\nwent on" in completed.stdout
    for broken in (text.replace("<!-- tests -->", ""), text.replace("pytest", "true"), ""):
        (checkout / "README.md").write_text(broken)
        completed = shell(checkout, f"tests=$(readme_command {checkout}/README.md)")
        assert completed.returncode != 0 and "went on" not in completed.stdout
        assert "<!-- tests -->" in completed.stderr


@pytest.mark.parametrize(
    ("installs", "registry", "status", "says"),
    [(0, 0, 0, "went on"), (1, 0, 1, "the registry answers"), (1, 1, 3, "SKIPPED lane vllm")],
)
def test_only_an_absent_registry_skips_a_lane(checkout, installs, registry, status, says):
    pip = checkout / "root/.venv/bin/pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(PIP)
    pip.chmod(0o755)
    completed = shell(
        checkout,
        "install_or_skip vllm -r launch/vllm-cpu.txt",
        INSTALLS=str(installs),
        REGISTRY=str(registry),
    )
    assert completed.returncode == status and says in completed.stdout + completed.stderr
    assert (checkout / "work/reports/vllm.skipped").exists() == (status == 3)


def test_the_table_has_exactly_the_parts_run():
    parts = [part for _, part, _, _ in PARTS]
    text = (CI / "run").read_text()
    assert sorted(parts) == sorted(re.findall(r"\brun_tests (\w+)", text))
    lines = [line for line in text.splitlines() if re.search(r"-m pytest\b", line)]
    # each pytest stands behind run_tests, in its line or in the one before
    assert len(lines) > 9 and all("run_tests" in x or x.startswith("    ") for x in lines), lines


def test_the_table_asks_for_nearly_all_tests():
    """A number that nobody raised for long proves little."""
    for _, part, landing, everything in PARTS:
        assert landing == "-" or 0 < int(landing) <= int(everything), part
    landing_tests = next(int(landing) for _, part, landing, _ in PARTS if part == "default")
    assert landing_tests > 3000


def test_shellcheck_has_nothing_to_say_about_the_run():
    command = [str(Path(sys.executable).parent / "shellcheck"), "-x", ".ci/run", ".ci/proof.sh"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout
