# SPDX-License-Identifier: Apache-2.0
"""The command of the check: a line for each verdict, and for each mistake."""

import re

import pytest

from pallas_kernels.check import __main__ as command
from pallas_kernels.check import child
from tests.pallas_kernels.check.made_verdicts import REFUSES, RIGHT, WRONG, judged


@pytest.mark.parametrize(
    "typed, message",
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
def test_a_mistake_is_one_line_and_starts_nothing(monkeypatch, capsys, typed, message):
    monkeypatch.setattr(child, "run_child", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as exit_info:
        command.main(typed)
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and re.search(message, line)


def test_the_command_fails_for_a_wrong_kernel(monkeypatch, capsys):
    monkeypatch.setattr(command, "may_have_accelerator", lambda: True)
    chip = {"platform": "gpu", "kind": "NVIDIA H200", "jax": "0.12"}
    monkeypatch.setattr(child, "find_chip", lambda: chip)
    for verdict, code in ((RIGHT, 0), (REFUSES, 0), (WRONG, 1)):
        monkeypatch.setattr(command, "make_judge", lambda *_, v=verdict, **__: judged(triton=v))
        assert command.main(["--impl", "triton"]) == code
        printed = capsys.readouterr().out
        text = {"right": "correct", "refuses": "unsupported", "wrong": "failed in"}[verdict.kind]
        assert (
            "NVIDIA H200" in printed and f"sink_attention   triton               {text}" in printed
        )
