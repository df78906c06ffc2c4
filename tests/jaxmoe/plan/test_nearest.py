# SPDX-License-Identifier: Apache-2.0
"""The nearest setting that fits: it fits, a run accepts it, and the nearer ones do not."""

import math

import jaxmoe.plan.nearest as search
from jaxmoe.config_file import load_config, override
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.plan.nearest import (
    SMALLEST,
    apply_changes,
    factorizations,
    find_nearest_fit,
    memory_settings,
    mesh_settings,
)
from jaxmoe.run.memory import plan_memory

GB = 10**9
CFG = load_config("gptoss20b.py")  # fsdp 2 x expert 4
HELD = plan_memory(CFG)


def test_all_factorisations_of_a_number_are_listed_once():
    products = list(factorizations(12, 3))
    assert len(products) == len(set(products)) == 18
    assert all(math.prod(cut) == 12 for cut in products)


def test_meshes_are_ordered_by_changes_and_cuts():
    first, *remaining = mesh_settings(CFG, 8)
    changed = [len(one) for one in remaining]
    assert first == [] and changed == sorted(changed) and changed[-1] == 4
    two = [" ".join(one) for one in remaining if len(one) == 2]
    cuts = ["sequence" in one or "tensor" in one for one in two]
    assert cuts == sorted(cuts) and {*cuts} == {False, True}


def test_cheap_settings_are_tried_first_and_in_turn():
    rungs = list(memory_settings(override(CFG, "optim.remat=False"), half=True))
    assert rungs[-1] == [
        "optim.remat=True",
        SMALLEST,
        "rollout.max_parallel_sequences=8",
        "optim.remat_inputs=host",
        "optim.moments=host",
        "optim.param_dtype=bfloat16",
    ]
    assert rungs == [rungs[-1][:n] for n in range(7)]


def test_mesh_host_bfloat16_and_devices_come_in_order():
    assert find_nearest_fit(CFG, HELD.training) == (8, [], HELD.training)
    order = [
        find_nearest_fit(CFG, memory) for memory in (HELD.training - 1, 60 * GB, 50 * GB, 30 * GB)
    ]
    assert order[0][:2] == (8, ["mesh.fsdp=1", "mesh.expert=8"])
    assert order[1][:2] == (8, ["optim.moments=host"])
    assert order[2][:2] == (8, ["optim.param_dtype=bfloat16"])
    assert order[3][0] == 16 and not any("param_dtype" in setting for setting in order[3][1])
    # 16 would do in bfloat16: another run, which so many devices are no reason for
    assert find_nearest_fit(CFG, 24 * GB)[:2] == (
        32,
        ["mesh.fsdp=8", "optim.tokens_per_microbatch=49152"],
    )
    devices, changes, needs = order[3]
    changed = override(CFG, *changes)
    check_mesh(changed)
    mem = plan_memory(changed)
    assert needs == max(mem.training, mem.sampling) <= 30 * GB and changed.mesh.devices == devices


def test_what_the_compiler_adds_counts():
    assert find_nearest_fit(CFG, HELD.training, (1.01, 1.0))[1] == ["mesh.fsdp=1", "mesh.expert=8"]


def test_fewer_sequences_at_once_fit_a_large_sampler():
    cfg = override(CFG, "rollout.max_parallel_sequences=16384")
    memory_plan = plan_memory(cfg)
    assert memory_plan.sampling > memory_plan.training
    assert find_nearest_fit(cfg, memory_plan.training)[1] == ["rollout.max_parallel_sequences=8"]


def test_where_nothing_fits_no_setting_is_told(monkeypatch):
    monkeypatch.setattr(search, "MAX_DEVICES", 8)
    assert find_nearest_fit(CFG, 10**6)[1:] == ([], 0)


def test_microbatches_are_the_smallest_that_a_mesh_allows():
    def tokens(*changes):
        tried = apply_changes(CFG, changes)
        assert tried is not None
        return tried[0].optim.tokens_per_microbatch // CFG.context, tried[1]

    twice, wide = ["mesh.fsdp=4"], ["mesh.fsdp=1", "mesh.tensor=8", "mesh.expert=1"]
    assert tokens() == (8, [])
    assert tokens(*twice) == (16, [*twice, f"optim.tokens_per_microbatch={16 * CFG.context}"])
    assert tokens(*wide) == (8, wide)  # one row would do
    assert tokens(*wide, SMALLEST) == (1, [*wide, f"optim.tokens_per_microbatch={CFG.context}"])
    assert apply_changes(CFG, ["mesh.tensor=5"]) is None


def test_counted_microbatches_are_smallest_only_if_needed():
    cfg = override(CFG, "optim.tokens_per_microbatch=0", "optim.microbatches=4")
    tried = apply_changes(cfg, [SMALLEST])
    assert tried is not None
    assert tried[1] == ["optim.microbatches=128"]  # 1,024 sequences on 8 devices
    unchanged = apply_changes(cfg, [])
    assert unchanged is not None and unchanged[1] == []
