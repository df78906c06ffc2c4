# SPDX-License-Identifier: Apache-2.0
"""GPUs and their memory for several servers, over what is built for each; none is needed here."""

import subprocess
from types import SimpleNamespace

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.vllm.engine import placement
from jaxmoe.vllm.engine.placement import (
    Placement,
    assign_gpus,
    count_gpus_per_server,
    list_visible_gpus,
    trainer_memory_fraction,
)


def format_placements(placements):
    return [
        ",".join(p.gpus)
        + (f" {p.memory_fraction:g}" if p.memory_fraction else "")
        + " shared" * (not p.exclusive)
        for p in placements
    ]


@pytest.mark.parametrize(
    ("gpus", "servers", "gpus_per_server", "trainer", "expected"),
    [
        ("0123", 4, 1, 0.0, ["0", "1", "2", "3"]),
        ("0123", 2, 2, 0.0, ["0,1", "2,3"]),
        ("012", 2, 2, 0.0, ["0,1 0.45 shared", "0,1 0.45 shared"]),
        ("01", 3, 1, 0.0, ["0 0.45 shared", "1", "0 0.45 shared"]),
        ("0", 1, 1, 0.75, ["0 0.2"]),
        ("0", 2, 1, 0.4, ["0 0.27 shared", "0 0.27 shared"]),
        ("01", 2, 1, 0.5, ["0 0.45", "1 0.45"]),
    ],
)
def test_servers_get_separate_gpus_while_enough_exist(
    gpus, servers, gpus_per_server, trainer, expected
):
    assert format_placements(assign_gpus(list(gpus), servers, gpus_per_server, trainer)) == expected


def test_without_gpus_vllm_finds_what_there_is():
    assert assign_gpus([], 2, 1, 0.75) == [Placement(), Placement()]
    assert Placement().gpu_environment() == Placement().vllm_options() == {}


def test_too_few_gpus_or_little_memory_is_refused():
    with pytest.raises(ConfigError, match="needs 4 GPUs .* 2 are visible .5, 7.. Try --set"):
        assign_gpus(["5", "7"], 1, 4, 0.0)
    with pytest.raises(ConfigError, match="8 vLLM .* share a GPU with 0.75 of it.*launch=1"):
        assign_gpus(["0"], 8, 1, 0.75)


def test_gpu_slices_and_shares_reach_the_environment(monkeypatch):
    shared = Placement(("3", "4"), 0.45)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    expected_environment = {"CUDA_VISIBLE_DEVICES": "3,4", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert shared.gpu_environment() == expected_environment  # the numbers are the driver's
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,3,2")
    assert shared.gpu_environment() == {"CUDA_VISIBLE_DEVICES": "3,4"}  # the numbers are the user's
    assert shared.vllm_options() == {"gpu_memory_utilization": "0.45"}


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("2,3", ["2", "3"]), ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]), ("", []), ("1,-1,2", ["1"])],
)
def test_only_gpus_visible_to_the_process_are_assigned(monkeypatch, variable, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert list_visible_gpus() == expected


def test_where_nothing_is_set_the_driver_is_asked(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    listed = SimpleNamespace(stdout="GPU 0: A (UUID: x)\nGPU 1: A (UUID: y)\n", returncode=0)
    monkeypatch.setattr(placement.subprocess, "run", lambda *_, **__: listed)
    assert list_visible_gpus() == ["0", "1"]

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert list_visible_gpus() == []


@pytest.mark.parametrize(
    ("args", "gpus_per_server"),
    [
        ("", 1),
        ("--tensor-parallel-size 2", 2),
        ("-tp=2 --pipeline_parallel_size 2", 4),
        ("--seed 7 -tp 8", 8),
        ("-tp many", 1),
    ],
)
def test_a_server_needs_the_gpus_of_its_options(args, gpus_per_server):
    assert count_gpus_per_server(args) == gpus_per_server


def test_the_trainers_part_is_what_xla_is_told(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert (trainer_memory_fraction(False), trainer_memory_fraction(True)) == (0.0, 0.75)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".4")
    assert trainer_memory_fraction(True) == 0.4
