# SPDX-License-Identifier: Apache-2.0
"""The dry run of experts in four bits: bytes by kind, from shapes alone."""

import jax
import pytest

from jaxmoe.config_file import load_config, override
from jaxmoe.model.params import abstract_params, cast_for_forward
from jaxmoe.model.rounded import round_experts
from jaxmoe.run.dry_run import format_plan
from jaxmoe.run.memory import plan_memory

ON_ONE = "mesh.fsdp=1", "mesh.expert=1"
DENSE = "quant.experts=none", "quant.rounding=nearest"
EXPERTS = 24 * 32 * 3 * 2880**2 * 17 // 32  # 4.25 bits a value


def test_engine_and_step_are_packed_with_optimizer_masters():
    cfg = override(load_config("gptoss20b_mxfp4.py"), *ON_ONE)
    mem, dense = plan_memory(cfg), plan_memory(override(cfg, *DENSE))
    read = jax.eval_shape(
        lambda params: cast_for_forward(round_experts(params), cfg.model),
        abstract_params(cfg.model),
    )
    assert mem.engine_copy == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))
    assert mem.rounded == EXPERTS and dense.rounded == 0
    assert dense.engine_copy - mem.engine_copy == EXPERTS * 64 // 17 - EXPERTS
    for name in ("weights", "optimizer", "gradients", "update", "activations", "cache"):
        assert getattr(mem, name) == getattr(dense, name)
    saved = dense.engine_copy - mem.engine_copy - mem.rounded
    assert dense.training - mem.training == saved > 0
    assert plan_memory(override(cfg, "loss.kl_coef=0.1")).rounded == 2 * EXPERTS
    halved = plan_memory(override(cfg, "optim.param_dtype=bfloat16"))
    assert 2 * halved.weights == mem.weights and halved.rounded == EXPERTS


@pytest.mark.parametrize("name", ["gptoss20b_mxfp4.py", "tiny_mxfp4.py"])
def test_the_plan_prints_them_by_kind(name):
    cfg = load_config(name)
    (line,) = [x for x in format_plan(cfg).splitlines() if x.startswith("  rounded ")]
    assert "GB" in line or "kB" in line
    dense = format_plan(override(cfg, *DENSE, "save.export_dtype=bfloat16"))
    assert "\n  rounded " not in dense


def test_a_device_of_a_mesh_has_its_share():
    cfg = load_config("gptoss20b_mxfp4.py")
    assert plan_memory(cfg).rounded == EXPERTS // 8
