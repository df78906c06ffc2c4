# SPDX-License-Identifier: Apache-2.0
"""Invariant numerics on chips that are not here, read off what their compilers make.

Prefill and decode of the native engine and the trainer's value and gradient, of other batches and
lengths each: the same kernels at the same tiles, the same loops over rows, and on the way to a
log-prob no product of matrices but the kernels'. Whether a chip then gives the same bits
tests/pallas_kernels/test_on_chip.py asks it.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.batches.batch import Batch
from jaxmoe.model import abstract_params, plain_ops, tiny
from jaxmoe.model.ops import invariant_ops, with_kernels
from jaxmoe.records import Sampling
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained
from jaxmoe.rollout.native import NativeEngine
from pallas_kernels.ahead_of_time import chip_mesh, compile_jitted, compiler_unavailable
from tests.pallas_kernels.in_hlo import kernels, library_matmuls, loop_bodies

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]

CFG = tiny(
    vocab_size=500,
    vocab_multiple=128,
    dtype="bfloat16",
    d_model=256,
    head_dim=64,
    n_q_heads=8,
    n_kv_heads=2,
    n_experts=8,
    experts_per_token=2,
    d_expert=192,
    sliding_window=128,
)
PROMPT, NEW, SAMPLES, ROWS = 64, 704, 4, 640  # 160 prompts; rows of a decode step: 3 turns of loops
BATCH = 6  # sequences of the trainer
CHIPS = ["v5e", *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("v5p", "v6e", "h100"))]
LOOPS = ("norm", "rotary", "rotate", "router", "experts")


def impl_of(chip):
    return "mosaic_gpu" if chip == "h100" else "mosaic_tpu"


@cache
def programs(chip):
    """The compiled text of prefill, decode and train."""
    if reason := compiler_unavailable(chip):
        pytest.skip(reason)
    ops = invariant_ops(plain_ops(), f"{impl_of(chip)}_invariant")
    text = dict(zip(("prefill", "decode"), sampling(chip, ops), strict=True))
    mesh = chip_mesh(chip)
    params = lie(mesh, abstract_params(CFG, "bfloat16"))
    text["train"] = compile_jitted(mesh, jax.jit(train(ops)), params, lie(mesh, batch())).as_text()
    return text


def sampling(chip, ops):
    """Prefill and decode, as the engine compiles them."""
    mesh, texts = chip_mesh(chip), []

    def make(jitted, *shapes, **static):
        compiled = compile_jitted(mesh, jitted, *lie(mesh, shapes), **static)
        texts.append(compiled.as_text())
        return compiled

    engine = NativeEngine(CFG, ops, max_prompt_tokens=PROMPT, max_new_tokens=NEW, max_rows=ROWS)
    stop = Sampling(max_new_tokens=NEW, stop_ids=(1,))
    engine.compile_programs(make, stop, abstract_params(CFG, "bfloat16"), samples=SAMPLES)
    return texts[0], texts[-1]  # between them the copies of a prompt's keys


def lie(mesh, tree):
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree)


def batch():
    shape = BATCH, PROMPT + NEW
    dtypes = dict(
        tokens_BT=jnp.int32,
        positions_BT=jnp.int32,
        segment_ids_BT=jnp.int32,
        loss_mask_BT=jnp.bool_,
        rollout_logp_BT=jnp.float32,
    )
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    rewards = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    return Batch(**arrays, rewards_B=rewards, samples_per_prompt=2)


def train(ops):
    scorer = Scorer(CFG, ops)

    def loss(params, batch):
        logp_BT = scorer.score_policy(Trained(params), batch)["logp_BT"]
        return -jnp.sum(jnp.where(batch.loss_mask_BT, logp_BT, 0.0)), logp_BT

    return jax.value_and_grad(loss, has_aux=True)


def of_forward(text):
    """Without the kernels of the backward pass."""
    lines = text.splitlines()
    return "\n".join(x for x in lines if "custom_call_target" not in x or "transpose(" not in x)


@pytest.mark.parametrize("chip", CHIPS)
def test_prefill_decode_and_training_use_equal_kernels(chip):
    kernels_by_program = {name: kernels(of_forward(text)) for name, text in programs(chip).items()}
    for name, of_train in kernels_by_program["train"].items():
        assert kernels_by_program["decode"][name] == of_train, name
        head = "logprobs" in name  # which a prefill does not reach
        assert head or kernels_by_program["prefill"][name] == of_train, name
    assert set(kernels_by_program["decode"]) == set(
        kernels_by_program["train"]
    )  # no kernel of decoding's own
    assert sum("logprobs" in name for name in kernels_by_program["decode"]) == 1


@pytest.mark.parametrize("chip", CHIPS)
def test_the_loops_over_rows_are_the_same(chip):
    text = programs(chip)
    for label in LOOPS:
        bodies = {n: set(loop_bodies(text[n], f"invariant_{label}")) for n in text}
        assert bodies["train"] and bodies["train"] == bodies["decode"] == bodies["prefill"], label
    merged = loop_bodies(text["train"], "invariant_logprobs")
    assert merged and set(merged) == set(loop_bodies(text["decode"], "invariant_sampled_logprobs"))


@pytest.mark.parametrize("chip", CHIPS)
def test_no_library_product_is_in_a_log_prob(chip):
    text = programs(chip)
    assert library_matmuls(text["prefill"]) == []
    drawing = library_matmuls(text["decode"])  # what is drawn from, and no log-prob is of them
    assert drawing and all("invariant_logits" in x for x in drawing)
    assert all("transpose(" in x for x in library_matmuls(text["train"]))


@pytest.mark.slow
def test_fast_numerics_do_not_pass_this():
    if reason := compiler_unavailable("v5e"):
        pytest.skip(reason)
    names = ("sink_attention", "decode_attention", "grouped_matmul", "grouped_swiglu")
    ops = with_kernels(replace(plain_ops()), dict.fromkeys(names, "mosaic_tpu"))
    prefill, decode = sampling("v5e", ops)
    assert len(library_matmuls(prefill)) > 4
    assert len([x for x in library_matmuls(decode) if "logits" not in x]) > 4
    assert "sink_attention_forward" not in kernels(decode)  # which has a kernel of its own
