# SPDX-License-Identifier: Apache-2.0
"""A verdict is read back for what it is about and for nothing else."""

import json

import pytest

from pallas_kernels.check import verdicts
from pallas_kernels.check.verdicts import KernelVerdict

CHIP = {"platform": "gpu", "kind": "NVIDIA H200", "driver": "cuda 13 580.1", "jax": "0.12 0.12"}
KEY = verdicts.verdict_key(CHIP, "sink_attention", "mosaic_gpu", "bfloat16", [{"sizes": (1, 2)}])


@pytest.fixture
def told():
    return []


def test_what_was_kept_is_read_back(tmp_path, told):
    assert verdicts.load_verdict(tmp_path, KEY, told.append) is None
    verdicts.save_verdict(
        tmp_path / "new", KEY, KernelVerdict("wrong", "in ragged: o errs"), told.append
    )
    assert verdicts.load_verdict(tmp_path / "new", KEY, told.append) == (
        "wrong",
        "in ragged: o errs",
    )
    assert not told and len(list((tmp_path / "new").iterdir())) == 1  # nothing half written


@pytest.mark.parametrize("name", [*CHIP, "source", "dtype", "real", "operation", "impl"])
def test_another_chip_version_or_question_has_another_verdict(tmp_path, told, name):
    verdicts.save_verdict(tmp_path, KEY, KernelVerdict("right", ""), told.append)
    assert verdicts.load_verdict(tmp_path, KEY | {name: "another"}, told.append) is None
    assert not told


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "cannot read"),
        ("\udcff", "cannot read"),
        ("[]", "contains no verdict"),
        ('{"key": {}, "verdict": {"kind": "right"}}', "contains no verdict"),
        (json.dumps({"key": KEY, "verdict": {"kind": "good", "reason": ""}}), "contains no"),
        (
            json.dumps({"key": KEY | {"kind": "v6e"}, "verdict": {"kind": "right", "reason": ""}}),
            "has a different kind; checking sink_attention again",
        ),
    ],
)
def test_a_corrupt_verdict_file_is_one_line(tmp_path, told, text, said):
    path = verdicts.verdict_path(tmp_path, KEY)
    path.write_text(text, errors="surrogateescape")
    assert verdicts.load_verdict(tmp_path, KEY, told.append) is None
    assert len(told) == 1 and said in told[0] and str(path) in told[0] and "\n" not in told[0]
    verdicts.save_verdict(tmp_path, KEY, KernelVerdict("right", "5 cases"), told.append)
    assert verdicts.load_verdict(tmp_path, KEY, told.append) == ("right", "5 cases")


def test_an_unwritable_folder_is_one_line(tmp_path, told):
    (tmp_path / "file").touch()
    verdicts.save_verdict(
        tmp_path / "file" / "folder", KEY, KernelVerdict("right", ""), told.append
    )
    assert len(told) == 1 and "cannot store" in told[0]


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert verdicts.verdict_folder() == tmp_path / "pallas_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert verdicts.verdict_folder().parts[-2:] == (".cache", "pallas_kernels")
