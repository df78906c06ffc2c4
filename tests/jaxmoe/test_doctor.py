# SPDX-License-Identifier: Apache-2.0
"""The command: exit status, report, picture, and the line to change."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe import doctor
from jaxmoe.collection.tasks import open_task
from jaxmoe.config_file import load_config, override
from jaxmoe.data.templates import Template
from jaxmoe.reconcile.compare import Report
from jaxmoe.reconcile.printed import format_verdict
from jaxmoe.reconcile.variants import Hypothesis
from jaxmoe.reconcile.verdict import Rounding, Verdict, format_partly

SMALL = (
    "--config tiny.py --set rollout.temperature=0.7 --set data.held_out_rows=16 "
    "--set data.train_rows=64"
).split()


def run_doctor(folder, engine="native"):
    """The exit status of the command with this engine."""
    return doctor.main([*SMALL, "--set", f"rollout.engine={engine}", "--workdir", str(folder)])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


def test_a_right_engine_agrees(run_folder, capsys):
    assert run_doctor(run_folder) == 0
    output = capsys.readouterr().out
    assert (
        "AGREE: mean |Δlogp|" in output
        and "tokens with the largest gaps" in output
        and "ESS 1.0000" in output
    )
    report = json.loads((run_folder / "doctor.json").read_text())
    assert report["agrees"] and report["verdict"] == "agree" and report["faults"] == []
    assert report["gap"] <= 4 * report["rounding"]["own"] and len(report["worst"]) == 8
    assert (run_folder / "plots" / "doctor.png").stat().st_size > 10_000


FOUR_BITS = (
    "--config tiny_mxfp4.py --set model.d_model=64 --set model.d_expert=64 "
    "--set data.held_out_rows=16 --set data.train_rows=64 --set rollout.max_new_tokens=6"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["scale=ocp", "rounding=stochastic"])
def test_an_engine_with_four_bits_shows_rounding(tmp_path, capsys, rule):
    sets = ["--set", "quant.experts=mxfp4_rollout", "--set", f"quant.{rule}"]
    assert doctor.main([*FOUR_BITS, *sets, "--workdir", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "DISAGREE: experts_rounded. mean |Δlogp|" in output
    assert "change: --set quant.experts=mxfp4, or correct the loss" in output
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["gap"] > 1e-2 and report["left"] <= 4 * report["rounding"]["own"]


@pytest.mark.slow
def test_a_trainer_and_engine_in_four_bits_agree(tmp_path):
    assert doctor.main([*FOUR_BITS, "--workdir", str(tmp_path)]) == 0


@pytest.mark.slow
def test_a_wrong_engine_is_not_agreed_with(run_folder, capsys):
    assert run_doctor(run_folder, "faulty_engines:scaled_logp") == 1
    output = capsys.readouterr().out
    assert "UNEXPLAINED: mean |Δlogp|" in output and "--set rollout.engine=native" in output
    assert not json.loads((run_folder / "doctor.json").read_text())["agrees"]


@pytest.mark.slow
def test_the_line_to_change_is_said(run_folder, capsys):
    assert run_doctor(run_folder, "faulty_engines:narrow_window") == 1
    output = capsys.readouterr().out
    assert "DISAGREE: window_minus_one" in output and '"sliding_window": 32' in output


def test_nonfinite_log_probs_are_reported_and_not_judged(run_folder, capsys):
    assert run_doctor(run_folder, "faulty_engines:nan_logp") == 1
    output = capsys.readouterr().out
    assert "NOT JUDGED: " in output and "log-probs are not finite: nan at token" in output
    assert "change:" not in output and "plot:" not in output
    report = json.loads((run_folder / "doctor.json").read_text())
    assert (report["verdict"], report["faults"], report["agrees"]) == ("not judged", [], False)


def format_head(kind, faults=(), ranked=(), reason="why", remaining=0.1):
    verdict = Verdict(kind, faults, 1.0, remaining, reason, list(ranked))
    none = np.zeros(0, np.float32)
    report = Report(verdict, [], Rounding(1e-6, 1e-6), {}, [], [], None, none, none)
    return format_verdict(report)[0]


def test_partial_explanations_are_unnamed_and_numbers_have_values():
    def fault(name, value=None, spread=0.0):
        return Hypothesis(name, "scalar", "must", "fix", lambda v: v, "", value, spread)

    part = format_head(
        "partly", (fault("sinks_off"),), reason=format_partly(1.0, 0.14, Rounding(1e-6, 1e-6))
    )
    assert part.startswith(
        "PARTLY: sinks_off explains 86% of the gap; 1.4e-01 remains, 1.4e+05 × rounding"
    )
    assert "DISAGREE: temperature 0.95 ± 2e-06." in format_head(
        "named", (fault("temperature", 0.95, 2e-6),)
    )
    ranked = [((fault(name),), remaining) for name, remaining in (("near", 0.79), ("far", 0.81))]
    assert "Nearest: near 7.9e-01. Until" in format_head("unexplained", ranked=ranked)
    assert "No fault explains a fifth" in format_head("unexplained", ranked=ranked[1:])


def test_ids_of_a_templates_specials_are_no_drift():
    template = "<|start|>user<|message|>{question}<|end|><|start|>assistant"
    task = open_task(
        override(load_config("tiny.py"), f"data.template={template}", "data.max_prompt_tokens=90")
    )
    prompt = task.held_out_prompts()[0]
    other_task = replace(task, template=Template(template.replace("user", "User")))
    assert doctor.encode_prompt(task, task.tokenizer, prompt) == prompt.tokens
    assert tuple(task.tokenizer.encode(prompt.text)) != prompt.tokens  # as plain text
    assert doctor.encode_prompt(other_task, task.tokenizer, prompt) != prompt.tokens


def test_weights_that_the_engine_refuses_are_the_answer(tmp_path, capsys):
    assert run_doctor(tmp_path, "faulty_engines:forgets_weights") == 1
    output = capsys.readouterr().out
    assert "DISAGREE: the engine failed to load the initial weights." in output
    assert "lm_head.weight" in json.loads((tmp_path / "doctor.json").read_text())["why"]


def test_a_mistake_is_status_2(tmp_path, capsys):
    assert doctor.main(["--config", "tiny.py", "--set", "optim.lr=-1"]) == 2
    assert "Try --set optim.lr=1e-05" in capsys.readouterr().err


def test_a_run_of_adapters_is_refused(tmp_path, capsys):
    assert doctor.main(["--config", "tiny_lora.py", "--workdir", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the doctor compares full weights" in err
    assert "jaxmoe.export --merge" in err and not (tmp_path / "run").exists()
