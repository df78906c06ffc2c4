# SPDX-License-Identifier: Apache-2.0
"""The command itself, in real processes: it stops, is killed, resumes and refuses."""

import random
import re
import signal

import pytest

from jaxmoe import train
from tests.jaxmoe.commands import command, finish, lines, start, wait_for


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """One run that nothing interrupted."""
    work = tmp_path_factory.mktemp("whole")
    code, out, err = finish(command(work))
    assert code == 0, err
    return work, out, err


@pytest.mark.slow
def test_plain_output_is_plain_lines(uninterrupted):
    work, out, err = uninterrupted
    assert "\x1b" not in out and "\r" not in out and err == ""
    assert re.search(r"^warmup +4/4 ", out, re.M) and re.search(r"^rl +5/5 ", out, re.M)
    assert (work / "plots" / "overview.png").stat().st_size > 0
    keys = [(r["stage"], r["step"]) for r in lines(work)]
    assert keys == [("warmup", i) for i in range(1, 5)] + [("rl", i) for i in range(6)]


@pytest.mark.slow
def test_on_policy_means_a_ratio_of_exactly_one(uninterrupted):
    rows = [r for r in lines(uninterrupted[0]) if r["stage"] == "rl" and r["step"] > 0]
    assert rows and all(r["policy/ratio_mean"] == 1.0 for r in rows)
    assert all(r["policy/clip_frac"] == 0.0 for r in rows)


@pytest.mark.slow
def test_eval_scores_a_checkpoint_as_the_log(uninterrupted):
    code, out, err = finish(command(uninterrupted[0], "jaxmoe.eval"))
    assert code == 0 and err == ""
    last = [r for r in lines(uninterrupted[0]) if "eval/accuracy" in r][-1]
    assert f"{last['eval/accuracy_greedy']:.4f} greedy, on 6 held-out rows (rl step 5)" in out


@pytest.mark.slow
def test_a_run_killed_in_either_stage_resumes_bitwise(uninterrupted, tmp_path):
    for stage, step in (("warmup", 3), ("rl", random.Random(0).randint(1, 4))):
        process = start(command(tmp_path))
        wait_for(process, tmp_path, stage, step)
        process.kill()
        process.communicate()
        assert lines(tmp_path) != lines(uninterrupted[0])
    code, out, err = finish(command(tmp_path))
    assert code == 0, err
    assert "resuming" in out and err == ""
    assert lines(tmp_path) == lines(uninterrupted[0])


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(uninterrupted, tmp_path):
    process = start(command(tmp_path, save__every_steps=1000))
    wait_for(process, tmp_path, "rl", 1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert re.search(r"SIGTERM: saved rl step \d", out) and "Traceback" not in err
    code, out, _ = finish(command(tmp_path, save__every_steps=1000))
    assert code == 0 and "resuming" in out
    assert lines(tmp_path) == lines(uninterrupted[0])


CUSTOM_CONFIG = """
from dataclasses import replace
from jaxmoe.config_file import load_config
def get_config():
    config = load_config("tiny.py")
    return replace(config, data=replace(config.data, options={}))
"""
BAD = {
    "bad row": ({"data.task": "bad.jsonl"}, "bad.jsonl"),
    "nobody at the url": (
        {"rollout.engine": "vllm", "rollout.vllm.url": "http://127.0.0.1:9"},
        "must name running vLLM servers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_no_folder(tmp_path, capsys, name):
    changes, message = BAD[name]
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question":\n')
    changes = {k: str(tmp_path / v) if str(v).endswith(".jsonl") else v for k, v in changes.items()}
    work = tmp_path / "run"
    args = command(work, **changes)[5:]
    if "data.task" in changes:  # a file takes no options, and --set cannot empty them
        (tmp_path / "own.py").write_text(CUSTOM_CONFIG)
        args[args.index("tiny.py")] = str(tmp_path / "own.py")
    code = train.main(args)
    out, err = capsys.readouterr()
    assert code == 2, (out, err)
    assert len(err.splitlines()) == 1 and err.startswith("error: ") and message in err
    assert "Traceback" not in out + err and not work.exists()
