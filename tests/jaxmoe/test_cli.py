# SPDX-License-Identifier: Apache-2.0
"""The command line: four options, and one line for a mistake."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.cli import ExitStatus, parse_config
from jaxmoe.run import dry_run

ROOT = Path(__file__).resolve().parents[2]


def run(*args):
    with ExitStatus() as status:
        cfg, is_dry_run = parse_config([*args, "--dry-run"], "Test.")
        assert is_dry_run
        print(dry_run.format_plan(cfg))
    return status.code


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["--config", "tiny.py", "--set", "optim.lrr=1"], "Did you mean optim.lr?"),
        (["--config", "tiny.py", "--set", "steps=many"], "steps must be int"),
        (["--config", "missing.py"], "there is no 'missing.py'"),
        (["--config"], "none was given. Shipped: gptoss120b.py, "),
        ([], "none was given. Shipped: gptoss120b.py, "),
        (["--config", "tinny.py"], "tiny_vllm.py. Try --config tiny.py\n"),
        (["--config", "tiny.py", "--set", "model.n_q_heads=7"], "must be a multiple of"),
        (["--config", "tiny.py", "--set", "rollout.sequences_per_step=12"], "must be a multiple"),
        (["--config", "tiny.py", "--workdir", ""], "workdir must be the path of a folder"),
        (["--config", "tiny.py", "--set", "workdir="], "workdir must be the path of a folder"),
        (["--config", "tiny.py", "--workdir", "gs://bucket/20b"], "Mount the bucket"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(args, answer, capsys):
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and answer in err and "Traceback" not in err


def test_a_full_disk_is_one_line_everywhere(capsys):
    with ExitStatus() as status, open("/dev/full", "w") as full:
        full.write("metrics")
    assert status.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "No space left" in err and "type the same command" in err


@pytest.mark.parametrize("name", ["EDQUOT", "EROFS", "EIO", "ESTALE", "EFBIG", "EMFILE"])
def test_other_disk_or_limit_errors_are_one_line(capsys, name):
    number = getattr(errno, name)
    with ExitStatus() as status:
        raise OSError(number, os.strerror(number), "runs/x/checkpoints")
    err = capsys.readouterr().err
    assert status.code == 2 and err.count("\n") == 1
    assert os.strerror(number) in err and "runs/x/checkpoints" in err


def test_an_error_of_a_program_keeps_its_traceback():
    with pytest.raises(FileNotFoundError), ExitStatus():
        open("/there/is/no/such/file")


PRINTS = """
import sys
from jaxmoe.cli import ExitStatus
with ExitStatus() as status:
    for i in range(int(sys.argv[1])):
        try:
            print("line", i, flush=sys.argv[2] == "flush")
        except BrokenPipeError as error:
            error.add_note("saved rl step 3 in runs/x; the same command resumes.")
            raise
sys.exit(status.code)
"""


@pytest.mark.parametrize("lines, flush", [("100000", "flush"), ("100000", ""), ("3", "")])
def test_piped_into_head_no_command_prints_a_traceback(lines, flush):
    """Also where all of it waits in a buffer until the command ends."""
    command = [sys.executable, "-c", PRINTS, lines, flush]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        if lines != "3":
            assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(60) == 128 + 13
    saved = b"saved rl step 3 in runs/x; the same command resumes.\n"
    assert stderr == saved or (lines == "3" and stderr == b"")


def test_output_onto_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", PRINTS, "3", ""], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "No space left on device" in result.stderr


def test_unprintable_letters_of_a_name_are_escaped(capsys):
    assert run("--config", "tiny.py", "--set", "init.checkpoint=\udce4\ud800") == 0
    assert r"weights      \udce4\ud800" in capsys.readouterr().out


def test_the_real_command_exits_with_two_and_line():
    result = subprocess.run(
        [sys.executable, "-m", "jaxmoe.train", "--config", "tinny.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_the_command_knows_exactly_four_options(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    words = capsys.readouterr().out.replace(",", " ").replace("[", " ").replace("]", " ").split()
    options = {w for w in words if w.startswith("--")}
    assert options == {"--help", "--config", "--set", "--workdir", "--dry-run"}


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--config", "tiny.py", "--lr", "1")
    assert stop.value.code == 2 and "--lr" in capsys.readouterr().err


def test_changes_apply_in_order_and_the_folder_wins(capsys):
    sets = ["--set", "steps=3", "--set", "steps=4", "--set", "workdir=a"]
    assert run("--config", "tiny.py", *sets, "--workdir", "b") == 0
    out = capsys.readouterr().out
    assert '"steps": 4' in out and '"workdir": "b"' in out
