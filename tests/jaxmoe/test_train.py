# SPDX-License-Identifier: Apache-2.0
"""The command itself, in real processes: it stops, is killed, resumes and refuses."""

import json
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
def test_eval_scores_the_checkpoint_as_the_last_line_does(uninterrupted):
    code, out, err = finish(command(uninterrupted[0], "jaxmoe.eval"))
    assert code == 0 and err == ""
    last = [r for r in lines(uninterrupted[0]) if "eval/accuracy" in r][-1]
    assert f"{last['eval/accuracy_greedy']:.4f} greedy, on 6 held-out rows (rl step 5)" in out


@pytest.mark.slow
def test_a_run_killed_in_either_stage_goes_on_bit_for_bit(uninterrupted, tmp_path):
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
def test_a_killed_run_goes_on_without_sharing_prompts(uninterrupted, tmp_path):
    process = start(command(tmp_path, optim__share_prompts="on", save__every_steps=1))
    wait_for(process, tmp_path, "rl", 2)
    process.kill()
    process.communicate()
    killed = lines(tmp_path)
    code, out, err = finish(command(tmp_path, optim__share_prompts="off", save__every_steps=1))
    assert code == 0 and err == "", err
    assert "optim.share_prompts=off (was on)" in out
    expected_rows, rows = lines(uninterrupted[0]), lines(tmp_path)
    assert killed == expected_rows[: len(killed)]  # it is the same program
    fracs = [r[name] for r in rows if (name := "batch/computed_tokens_frac") in r]
    shares = [frac < 1.0 for frac in fracs]
    assert shares == sorted(shares, reverse=True) and any(shares) and not all(shares)
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, int | float) and not name.startswith("batch/"):
                assert abs(row[name] - value) <= 2e-5 * max(1.0, abs(value)), name


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


@pytest.mark.slow
def test_off_policy_updates_with_a_reference_run(tmp_path):
    code, _, err = finish(
        command(
            tmp_path,
            loss__old_logp="recomputed",
            loss__epochs=2,
            loss__kl_coef=0.1,
            steps=2,
            warmup__steps=2,
        )
    )
    assert code == 0 and err == ""
    assert [(r["stage"], r["step"]) for r in lines(tmp_path)][-1] == ("rl", 2)


QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PPO = {
    "loss.advantages": "whitened_gae(trace=0.9)",
    "critic.backbone": "own",
    "loss.minibatches": 2,
    "loss.old_logp": "recomputed",
    "critic.pretrain_steps": 1,
    "loss.kl_coef": 0.1,
    "loss.kl_in": "reward",
    "optim.tokens_per_microbatch": 128,
    "rollout.top_p": 0.9,
    "loss.rollout_correction": "veto + token_is",
    "rollout.overlong_buffer": 3,
}


@pytest.mark.slow
@pytest.mark.extended  # three commands; test_mesh_step.py has twenty steps of PPO
def test_ppo_with_a_critic_goes_on_bit_for_bit(tmp_path):
    for folder, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        typed = command(tmp_path / folder, **PPO | {"steps": steps})
        code, _, err = finish(typed, XLA_FLAGS=QUICKLY)  # four models, most of it compiling
        assert code == 0 and err == ""
    uninterrupted, parts = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    # the last step of a run is scored, and step 2 was the last of the first part
    scores = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in parts]
    assert scores == [
        {k: v for k, v in r.items() if not k.startswith("eval/")} for r in uninterrupted
    ]
    last = uninterrupted[-1]
    assert last["critic/grad_norm"] > 0 and last["train_rollout_logprob_abs_diff"] < 1e-5


@pytest.mark.slow
@pytest.mark.extended  # test_update_terms.py closes it
def test_a_closed_gate_saves_and_the_same_command_goes_on_when_it_is_opened(
    uninterrupted, tmp_path
):
    code, out, err = finish(command(tmp_path, gate__k3=1e-30))
    assert code == 2 and len(err.splitlines()) == 1 and "Traceback" not in out + err
    assert err.startswith("error: rl step 1: engine and trainer must agree within gate.abs_diff")
    code, _, err = finish(command(tmp_path))
    assert code == 0 and err == ""
    assert lines(tmp_path) == lines(uninterrupted[0])
    skipping = tmp_path / "skipping"
    code, out, _ = finish(command(skipping, gate__k3=1e-30, gate__skip=True))
    assert code == 0 and "this batch was not trained on" in out
    assert [r["gate/closed"] for r in lines(skipping) if "gate/closed" in r] == [1.0] * 5


AHEAD = {
    "rollout.max_staleness": 2,
    "loss.rollout_correction": "token_is",
    "rollout.max_gen_batches": 1,
}
NOTED = """
import json, sys
from dataclasses import replace
from jaxmoe.cli import ExitStatus, parse_config
from jaxmoe.config import EngineError
from jaxmoe.collection.batches import make_batch
from jaxmoe.run.parts import make_parts
from jaxmoe.rollout.engine import open_engine
from jaxmoe.train import train

path, breaks, calls = sys.argv[1], int(sys.argv[2]), []

def noted(cfg, task, rollouts, rewards):
    with open(path, "a") as file:
        print(json.dumps([r.prompt.id for r in rollouts]), file=file)
    return make_batch(cfg, task, rollouts, rewards)

def open_breaking(*arguments):
    engine = open_engine(*arguments)
    generate = engine.generate

    def generate_or_break(*args, **named):
        calls.append(1)
        if len(calls) == breaks:
            raise EngineError("the engine broke.")
        return generate(*args, **named)

    engine.generate = generate_or_break
    return engine

with ExitStatus() as status:
    cfg, _ = parse_config(sys.argv[3:], "Train.")
    train(cfg, replace(make_parts(cfg), make_batch=noted, open_engine=open_breaking))
sys.exit(status.code)
"""


def noting(work, notes, breaks=0, **changes):
    """The command, in a process that notes the prompts of every batch it trains on."""
    args = command(work, **AHEAD | changes)
    index = args.index("-m")
    return [*args[:index], "-c", NOTED, str(notes), str(breaks), *args[index + 2 :]]


def noted(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """A run ahead of its weights that nothing interrupted: the prompts of its batches."""
    folder = tmp_path_factory.mktemp("ahead")
    code, _, err = finish(noting(folder / "run", folder / "notes"), XLA_FLAGS=QUICKLY)
    assert code == 0 and err == "", err
    rows = [r for r in lines(folder / "run") if r["stage"] == "rl" and r["step"] > 0]
    assert all(r["staleness/max"] <= 2 for r in rows) and rows[1]["staleness/max"] > 0
    return noted(folder / "notes")


@pytest.mark.slow
@pytest.mark.extended  # four commands; test_async_rollouts.py has it in one process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_prompt_is_lost_or_doubled_ahead_of_the_weights(ahead, tmp_path, number):
    process = start(noting(tmp_path / "run", tmp_path / "first"), XLA_FLAGS=QUICKLY)
    wait_for(process, tmp_path / "run", "rl", random.Random(number).randint(1, 3))
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err and (number == signal.SIGKILL or process.returncode == 143)
    code, out, err = finish(noting(tmp_path / "run", tmp_path / "second"), XLA_FLAGS=QUICKLY)
    assert code == 0 and err == "" and "resuming" in out
    matches = re.search(r"after rl step (\d)", out)
    saved = int(matches[1]) if matches else 0  # or after the warm start
    assert noted(tmp_path / "first")[:saved] + noted(tmp_path / "second") == ahead
    keys = [(r["stage"], r["step"]) for r in lines(tmp_path / "run")]
    assert keys == [("warmup", i) for i in range(1, 5)] + [("rl", i) for i in range(6)]


@pytest.mark.slow
@pytest.mark.extended  # as many commands
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_broken_engine_saves_the_run_and_says_so_in_one_line(ahead, tmp_path, staleness):
    changes = {"rollout.max_staleness": staleness, "save.every_steps": 100}
    work = tmp_path / "run"
    # two calls score the held-out rows before the first step, and two after the second
    typed = noting(work, tmp_path / "first", breaks=8, **changes)
    code, out, err = finish(typed, XLA_FLAGS=QUICKLY)
    assert code == 1 and len(err.splitlines()) == 1 and "Traceback" not in out + err
    match = re.fullmatch(
        rf"error: the engine broke. saved rl step (\d) in {work}; the same command resumes.\n", err
    )
    assert match, err
    code, _, err = finish(noting(work, tmp_path / "second", **changes), XLA_FLAGS=QUICKLY)
    assert code == 0 and err == ""
    assert noted(tmp_path / "first")[: int(match[1])] + noted(tmp_path / "second") == ahead
    rows = [r for r in lines(work) if r["stage"] == "rl"]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 6))
    assert [r["step"] for r in rows if "eval/accuracy" in r] == [0, 2, 4, 5]


CUSTOM_CONFIG = """
from dataclasses import replace
from jaxmoe.config_file import load_config
def get_config():
    config = load_config("tiny.py")
    return replace(config, data=replace(config.data, options={}))
"""
BAD = {
    "unknown key": ({"optim.lrr": 1}, "Did you mean optim.lr"),
    "empty file": ({"data.task": "empty.jsonl"}, "empty.jsonl"),
    "bad row": ({"data.task": "bad.jsonl"}, "bad.jsonl"),
    "small vocabulary": ({"model.vocab_size": 100}, "vocab"),
    "long prompt": ({"data.max_prompt_tokens": 3}, "max_prompt_tokens"),
    "no interpreter": (
        {"rollout.engine": "vllm", "rollout.vllm.python": "/no/such/python"},
        "must be a Python interpreter",
    ),
    "nobody at the url": (
        {"rollout.engine": "vllm", "rollout.vllm.url": "http://127.0.0.1:9"},
        "must name running vLLM servers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_leaves_no_folder(tmp_path, capsys, name):
    changes, message = BAD[name]
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question":\n')
    changes = {k: str(tmp_path / v) if str(v).endswith(".jsonl") else v for k, v in changes.items()}
    work = tmp_path / "run"
    args = command(work, **changes)
    if "data.task" in changes:  # a file takes no options, and --set cannot empty them
        (tmp_path / "own.py").write_text(CUSTOM_CONFIG)
        args[args.index("tiny.py")] = str(tmp_path / "own.py")
    if name == next(iter(BAD)):  # one as a user's process, the others here: a process takes seconds
        code, out, err = finish(args)
    else:
        code = train.main(args[args.index("--config") :])
        out, err = capsys.readouterr()
    assert code == 2, (out, err)
    assert len(err.splitlines()) == 1 and err.startswith("error: ") and message in err
    assert "Traceback" not in out + err and not work.exists()
