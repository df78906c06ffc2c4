# SPDX-License-Identifier: Apache-2.0
"""The command: exit status, report, picture, and the line to change."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe import doctor
from jaxmoe.config import EngineError
from jaxmoe.config_file import load_config, override
from jaxmoe.data.templates import Template
from jaxmoe.engines import open_engine
from jaxmoe.envs.tasks import open_task
from jaxmoe.reconcile.compare import Report
from jaxmoe.reconcile.printed import verdict_lines
from jaxmoe.reconcile.variants import Hypothesis
from jaxmoe.reconcile.verdict import Rounding, Verdict, partly

SMALL = [
    "--config", "tiny.py", "--set", "rollout.temperature=0.7", "--set", "data.held_out_rows=16",
    "--set", "data.train_rows=64",
]  # fmt: skip


class Raw:
    """An engine that answers as ours, and tells other log-probs."""

    def __init__(self, inner, told=lambda logp: logp * 0.9 - 0.1):
        self.inner, self.told = inner, told

    incidents = ()

    def load(self, params, version):
        self.inner.load(params, version)

    def generate(self, prompts, sampling, *, seed, samples=1):
        cool = self.inner.generate(prompts, sampling, seed=seed, samples=samples)
        return [replace(r, rollout_logp=self.told(r.rollout_logp)) for r in cool]

    def close(self):
        self.inner.close()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


def test_a_right_engine_agrees(work, capsys):
    assert doctor.main([*SMALL, "--workdir", str(work)]) == 0
    said = capsys.readouterr().out
    assert "AGREE: mean |Δlogp|" in said and "the worst tokens" in said and "ESS 1.0000" in said
    report = json.loads((work / "doctor.json").read_text())
    assert report["agrees"] and report["verdict"] == "agree" and report["faults"] == []
    assert report["gap"] <= 4 * report["rounding"]["own"] and len(report["worst"]) == 8
    assert (work / "plots" / "doctor.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_wrong_engine_is_not_agreed_with(work, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "open_engine", lambda *given: Raw(open_engine(*given)))
    assert doctor.main([*SMALL, "--workdir", str(work)]) == 1
    said = capsys.readouterr().out
    assert "UNEXPLAINED: mean |Δlogp|" in said and "--set rollout.engine=native" in said
    assert not json.loads((work / "doctor.json").read_text())["agrees"]


@pytest.mark.slow
def test_the_line_to_change_is_said(work, monkeypatch, capsys):
    def narrow(cfg, ops, work):
        model = replace(cfg.model, sliding_window=31)
        return open_engine(replace(cfg, model=model), ops, work)

    monkeypatch.setattr(doctor, "open_engine", narrow)
    assert doctor.main([*SMALL, "--workdir", str(work)]) == 1
    said = capsys.readouterr().out
    assert "DISAGREE: window_minus_one" in said and '"sliding_window": 32' in said


def test_log_probs_that_are_no_numbers_are_said_and_nothing_is_named(work, monkeypatch, capsys):
    def nan(*given):
        return Raw(open_engine(*given), lambda logp: np.where(logp < -5.0, np.nan, logp))

    monkeypatch.setattr(doctor, "open_engine", nan)
    assert doctor.main([*SMALL, "--workdir", str(work)]) == 1
    said = capsys.readouterr().out
    assert "NOT JUDGED: " in said and "log-probs are not finite: nan at token" in said
    assert "change:" not in said and "plot " not in said
    report = json.loads((work / "doctor.json").read_text())
    assert (report["verdict"], report["faults"], report["agrees"]) == ("not judged", [], False)


def said(kind, faults=(), ranked=(), why="why", left=0.1):
    verdict = Verdict(kind, faults, 1.0, left, why, list(ranked))
    none = np.zeros(0, np.float32)
    report = Report(verdict, [], Rounding(1e-6, 1e-6), {}, [], [], None, none, none)
    return verdict_lines(report)[0]


def test_a_part_is_no_name_and_a_number_has_its_value():
    def fault(name, value=None, spread=0.0):
        return Hypothesis(name, "scalar", "must", "fix", lambda v: v, "", value, spread)

    part = said("partly", (fault("sinks_off"),), why=partly(1.0, 0.14, Rounding(1e-6, 1e-6)))
    assert part.startswith("PARTLY: sinks_off explains 86%, 1.4e-01 remains, 1.4e+05 × rounding")
    assert "DISAGREE: temperature 0.95 ± 2e-06." in said(
        "named", (fault("temperature", 0.95, 2e-6),)
    )
    ranked = [((fault(name),), left) for name, left in (("near", 0.79), ("far", 0.81))]
    assert "Nearest: near 7.9e-01. Until" in said("unexplained", ranked=ranked)
    assert "Nothing that was tried explains a fifth" in said("unexplained", ranked=ranked[1:])


def test_ids_of_a_template_with_special_tokens_are_no_drift():
    template = "<|start|>user<|message|>{question}<|end|><|start|>assistant"
    task = open_task(
        override(load_config("tiny.py"), f"data.template={template}", "data.max_prompt_tokens=90")
    )
    prompt = task.held_out_prompts()[0]
    other = replace(task, template=Template(template.replace("user", "User")))
    assert doctor.prompt_ids(task, task.tokenizer, prompt) == prompt.tokens
    assert tuple(task.tokenizer.encode(prompt.text)) != prompt.tokens  # as plain text
    assert doctor.prompt_ids(other, task.tokenizer, prompt) != prompt.tokens


def test_weights_that_the_engine_refuses_are_the_answer(tmp_path, monkeypatch, capsys):
    class Forgets(Raw):
        def load(self, params, version):
            raise EngineError("received but not in the live model: lm_head.weight")

    monkeypatch.setattr(doctor, "open_engine", lambda *given: Forgets(open_engine(*given)))
    assert doctor.main([*SMALL, "--workdir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "DISAGREE: the engine does not hold the initial weights." in said
    assert "lm_head.weight" in json.loads((tmp_path / "doctor.json").read_text())["why"]


def test_a_mistake_is_status_2(tmp_path, capsys):
    assert doctor.main(["--config", "tiny.py", "--set", "model.n_layers=3"]) == 2
    assert "Try --set model.n_layers=4" in capsys.readouterr().err


def test_a_run_of_adapters_is_refused_in_one_line(tmp_path, capsys):
    assert doctor.main(["--config", "tiny_lora.py", "--workdir", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "must have whole weights to compare" in err
    assert "jaxmoe.export --merge" in err and not (tmp_path / "run").exists()
