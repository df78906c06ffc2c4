# SPDX-License-Identifier: Apache-2.0
"""The command of the check: a line for each verdict, and for each mistake."""

import re

import pytest

from pallas_kernels.check import __main__ as command
from pallas_kernels.check import child, verdicts
from tests.pallas_kernels.check.made_verdicts import REFUSES, RIGHT, WRONG, judged


@pytest.mark.parametrize(
    "typed, said",
    [
        (["attention"], "operation must be one of sink_attention.*got 'attention'"),
        (["--impl", "mosaic"], "--impl must be one of mosaic_gpu.*got 'mosaic'"),
        (["--dtype", "int8"], "--dtype must be one of bfloat16, float32; got 'int8'"),
        (["--timeout", "soon"], "invalid float value: 'soon'"),
        (["--timeout", "0"], "--timeout must be above 0; got 0"),
        (["--timeout", "nan"], "--timeout must be above 0; got nan"),
        (
            ["token_logprobs", "--impl", "triton"],
            "--impl must name an implementation of token_logprobs; got triton",
        ),
        ([], "kernels must run on their platform; this machine is a cpu"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(monkeypatch, capsys, typed, said):
    monkeypatch.setattr(child, "run_child", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as left:
        command.main(typed)
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and re.search(said, line)


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "cannot read"),
        ("[]", "contains no verdict"),
        (
            '{"key": {"kind": "TPU v6e"}, "verdict": {"kind": "right", "reason": ""}}',
            "has a different",
        ),
    ],
)
def test_the_command_names_a_bad_verdict_file(monkeypatch, capsys, tmp_path, text, said):
    here = {"platform": "gpu", "kind": "NVIDIA H200", "driver": "", "jax": "0.12"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "may_have_accelerator", lambda: True)
    monkeypatch.setattr(child, "find_chip", lambda: here)
    monkeypatch.setattr(child, "check_kernel", lambda *_: WRONG)
    path = verdicts.verdict_path(
        verdicts.verdict_folder(),
        verdicts.verdict_key(here, "sink_attention", "triton", "bfloat16", None),
    )
    path.parent.mkdir()
    path.write_text(text)
    for lines in (4, 2):  # the second time what was found the first time is on file
        assert command.main(["--impl", "triton"]) == 1
        told = capsys.readouterr().out.splitlines()
        assert len(told) == lines and told[-1].endswith(
            "failed in case ragged: o: relative error 1"
        )
        again = [x for x in told if str(path) in x]
        assert len(again) == (lines == 4) and all(said in x for x in again)


def test_the_command_fails_for_a_wrong_kernel(monkeypatch, capsys):
    monkeypatch.setattr(command, "may_have_accelerator", lambda: True)
    here = {"platform": "gpu", "kind": "NVIDIA H200", "jax": "0.12"}
    monkeypatch.setattr(child, "find_chip", lambda: here)
    for verdict, code in ((RIGHT, 0), (REFUSES, 0), (WRONG, 1)):
        monkeypatch.setattr(command, "make_judge", lambda *_, v=verdict, **__: judged(triton=v))
        assert command.main(["--impl", "triton"]) == code
        said = capsys.readouterr().out
        text = {"right": "correct", "refuses": "unsupported", "wrong": "failed in"}[verdict.kind]
        assert "NVIDIA H200" in said and f"sink_attention   triton               {text}" in said
