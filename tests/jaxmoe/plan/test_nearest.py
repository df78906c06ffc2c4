# SPDX-License-Identifier: Apache-2.0
"""The nearest setting that fits: it fits, a run accepts it, and nothing nearer would do."""

import math

import pytest

import jaxmoe.plan.nearest as search
from jaxmoe.config_file import load, override
from jaxmoe.memory import memory
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.plan.nearest import nearest, products

GB = 10**9
BIG = load("gptoss120b.py")  # fsdp 8 x expert 8
LONG = override(
    load("gptoss20b.py"), "data.max_prompt_tokens=8192", "rollout.max_new_tokens=16384",
    "optim.tokens_per_microbatch=196608",
)  # fmt: skip


def test_all_ways_to_write_a_number_as_factors_are_found_once():
    found = list(products(12, 3))
    assert len(found) == len(set(found)) == 18
    assert all(math.prod(cut) == 12 for cut in found)


@pytest.mark.parametrize(("cfg", "there"), [(BIG, 50 * GB), (LONG, 60 * GB)])
def test_what_is_found_fits_and_a_run_takes_it(cfg, there):
    devices, changes, needs = nearest(cfg, there)
    other = override(cfg, *changes)
    check_mesh(other)
    mem = memory(other)
    assert other.mesh.devices == devices
    assert needs == max(mem.training, mem.sampling) <= there
    assert max(memory(cfg).training, memory(cfg).sampling) > there


def test_as_many_devices_are_tried_before_more_and_the_mesh_before_bfloat16():
    mem = memory(BIG)
    assert nearest(BIG, mem.training) == (64, [], mem.training)
    devices, changes, _ = nearest(BIG, mem.training - 1)
    assert devices == 64 and changes and not any("param_dtype" in one for one in changes)
    devices, changes, _ = nearest(BIG, 30 * GB)
    assert devices > 64 and not any("param_dtype" in one for one in changes)


def test_what_the_compiler_adds_counts():
    mem = memory(BIG)
    assert nearest(BIG, mem.training, (1.01, 1.0))[1]
    assert nearest(BIG, mem.training, (1.0, 10.0))[1]


def test_where_nothing_fits_no_setting_is_told(monkeypatch):
    monkeypatch.setattr(search, "MOST", 64)
    assert nearest(BIG, 10**6)[1:] == ([], 0)
