# SPDX-License-Identifier: Apache-2.0
"""An export beside the run: 0 for what the run read, and a cost for what was rounded afterwards."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_weights

from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.config_file import load_config, resolve
from jaxmoe.model import plain_ops
from jaxmoe.model.rounded import decode_experts, round_experts
from jaxmoe.run.compare_export import compare_export, format_export_gap, score_answers

pytestmark = pytest.mark.slow

SMALL = (
    "model.d_model=64",
    "model.d_expert=64",
    "model.n_experts=6",
    "data.train_rows=16",
    "data.held_out_rows=8",
    "rollout.max_new_tokens=4",
)
DENSE = resolve(load_config("tiny.py"), *SMALL, "save.export_dtype=mxfp4")
POLICY = random_weights(DENSE.model, 3)


def test_rounding_a_dense_run_costs_the_log_probs(tmp_path):
    save_params(POLICY, DENSE.model, tmp_path / "out", dtype="mxfp4")
    with jax.numpy_dtype_promotion("standard"):
        gap = compare_export(DENSE, POLICY, tmp_path / "out", version=5)
    assert gap.n_answers == 16 and gap.n_tokens >= 16
    assert 1e-3 < gap.mean < gap.largest and 0 < gap.switched < 1
    first, second = format_export_gap(gap)
    assert f"max {gap.largest:.2g} nats; other experts in {gap.switched:.2%}" in first
    assert second.startswith("accuracy on the held-out rows: 0.0000 -> 0.0000 sampled")

    # of the size that other tokens have too, by another path to the same weights
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 40)), jnp.int32)
    exported = load_params(tmp_path / "out", DENSE.model, "float32")
    (logp, experts), (other, other_experts) = (
        score_answers(
            params, tokens, jnp.ones_like(tokens), jnp.int32(0), cfg=DENSE.model, ops=plain_ops()
        )
        for params in (POLICY, jax.tree.map(jnp.asarray, exported))
    )
    mean = float(np.abs(np.asarray(logp) - np.asarray(other))[:, 1:].mean())
    switched = float((np.sort(experts, -1) != np.sort(other_experts, -1)).any(-1).mean())
    assert 0.3 < gap.mean / mean < 3 and 0.3 < gap.switched / switched < 3


@pytest.mark.parametrize("dtype", ["mxfp4", "float32"])
def test_only_a_changed_export_of_rounded_runs_differs(tmp_path, dtype):
    cfg = resolve(load_config("tiny_mxfp4.py"), *SMALL, f"save.export_dtype={dtype}")
    packed = round_experts(POLICY)
    save_params(packed, cfg.model, tmp_path / "out", dtype=dtype)
    changed = decode_experts(packed, "float32")
    router = changed["layers"]["full"]["w_router"]
    changed["layers"]["full"] = changed["layers"]["full"] | {
        "w_router": router.at[:, 0].multiply(3)
    }
    save_params(changed, cfg.model, tmp_path / "changed", dtype=dtype)
    with jax.numpy_dtype_promotion("standard"):
        same, other = (
            compare_export(cfg, POLICY, tmp_path / name, version=0) for name in ("out", "changed")
        )
    assert same.before is None and len([*format_export_gap(same)]) == 1
    assert same == replace(same, switched=0.0) and same.largest <= 2e-5
    if dtype == "mxfp4":
        assert same.largest == 0
    assert other.mean > 1e-3 and other.switched > 0.01
