# SPDX-License-Identifier: Apache-2.0
"""The whole RL step with every kernel, by config alone, through the chips' own compilers.

GPT-OSS 20B's width and vocabulary, one pair of layers, two sequences of 4,096 tokens; for a TPU of
512, and with XLA's least effort: at its usual one libtpu had not come to an end after 15 minutes,
of which it spends 3 on a single sum of rows. Kernels are Mosaic's to compile, at any effort.
Nothing is executed. `-s` prints what docs/results/kernels.md says of it.
"""

import contextlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.batches.batch import Batch
from jaxmoe.config import Config, DataConfig, OptimConfig, RolloutConfig
from jaxmoe.config_file import override
from jaxmoe.model import abstract_params, forward, make_ops, tiny
from jaxmoe.model.config import gpt_oss_20b
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import init_rl_state
from jaxmoe.rl.update import rl_step
from pallas_kernels.ahead_of_time import GPUS, TPUS, compile_for, compiler_unavailable

pytestmark = [pytest.mark.aot, pytest.mark.timeout(3600)]

CFG = override(
    Config(
        model=gpt_oss_20b(),
        data=DataConfig(task="reasoning_gym:spell_backward", max_prompt_tokens=2048),
        rollout=RolloutConfig(sequences_per_step=2, samples_per_prompt=2, max_new_tokens=2048),
        optim=OptimConfig(lr=1e-6, param_dtype="bfloat16"),
        steps=1,
    ),
    "model.n_layers=2",
)


SHORT = ("data.max_prompt_tokens=256", "rollout.max_new_tokens=256")


@contextlib.contextmanager
def effort(chip):
    """XLA's least for a TPU, its usual one for a GPU."""
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", "O0" if chip in TPUS else before)
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)


def kernels_of(chip):
    return "mosaic_gpu" if chip in GPUS else "mosaic_tpu"


def compiled_step(chip, kernels):
    """`rl_step` of the config, and nothing patched."""
    cfg = override(CFG, f"kernels={kernels}", *(SHORT if chip in TPUS else ()))
    tx, shape = rl_optimizer(cfg), (cfg.rollout.sequences_per_step, cfg.context)

    def array(dtype, shape=shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = Batch(
        tokens_BT=array(jnp.int32),
        positions_BT=array(jnp.int32),
        segment_ids_BT=array(jnp.int32),
        loss_mask_BT=array(jnp.bool_),
        rollout_logp_BT=array(jnp.float32),
        rewards_B=array(jnp.float32, shape[:1]),
        samples_per_prompt=2,
    )
    policy = abstract_params(cfg.model, cfg.optim.param_dtype)
    state = jax.eval_shape(lambda p: init_rl_state(p, cfg, tx), policy)
    step = partial(
        rl_step,
        tx=tx,
        algorithm=algorithm_from_config(cfg),
        scorer=Scorer(cfg.model, make_ops(cfg)),
        gate=cfg.gate,
    )
    with jax.numpy_dtype_promotion("standard"), effort(chip):
        return compile_for(chip, step, state, batch, donate=(0,))


def print_sizes(chip, kernels, compiled, calls):
    analysis = compiled.executable.memory_analysis()
    sizes = f"{1e-9 * analysis.argument_size_in_bytes:.2f} GB of arguments" if analysis else ""
    print(
        f"{chip} {kernels}: {calls} kernels called, "
        f"{1e-9 * compiled.temp_bytes:.2f} GB beside {sizes}"
    )


# forward and backward, in each of two layers: attention 1 + 2, on a TPU 1 + 1; gate and up 1 + 2,
# down 1 + 2. Log-probs 1 + 2 or more
LEAST = {chip: 2 * (1 + (1 if chip in TPUS else 2) + 3 + 3) + 3 for chip in ("h200", "v5p", "v6e")}


@pytest.mark.slow
@pytest.mark.parametrize("chip", LEAST)
def test_the_step_of_a_config_compiles_within_memory(chip):
    if reason := compiler_unavailable(chip):
        pytest.skip(reason)
    kernels = kernels_of(chip)
    compiled = compiled_step(chip, kernels)
    calls = compiled.mosaic_calls if chip in GPUS else len(compiled.vmem_bytes)
    print_sizes(chip, kernels, compiled, calls)
    assert calls >= LEAST[chip]
    for kernel in compiled.kernels:
        assert kernel.spills == 0 and kernel.stack == 0, kernel
    plain = compiled_step(chip, "xla")
    print_sizes(chip, "xla", plain, plain.mosaic_calls + len(plain.vmem_bytes))
    assert plain.mosaic_calls == len(plain.vmem_bytes) == 0
    assert compiled.temp_bytes < plain.temp_bytes


def forwards_of_attention(chip, *settings):
    """How often a gradient through one pair of layers calls attention's forward kernel."""
    model = tiny(head_dim=64, dtype="bfloat16", sliding_window=128)
    cfg = override(replace(CFG, model=model), *settings)
    ops = make_ops(cfg, {"sink_attention": kernels_of(chip)})

    def loss(params, tokens_BT):
        return jnp.sum(forward(params, tokens_BT, model, ops)[0].astype(jnp.float32))

    tokens_BT = jax.ShapeDtypeStruct((2, 192), jnp.int32)
    with effort(chip):
        compiled = compile_for(chip, jax.grad(loss), abstract_params(model, "bfloat16"), tokens_BT)
    calls = [
        x for x in (compiled.executable.as_text() or "").splitlines() if "custom_call_target=" in x
    ]
    return sum("sink_attention_forward" in x for x in calls)


@pytest.mark.parametrize("chip", [pytest.param("h200", marks=pytest.mark.slow), "v6e"])
def test_saved_attention_runs_once_a_layer_else_twice(chip):
    if reason := compiler_unavailable(chip):
        pytest.skip(reason)
    recompute = "optim.remat=True"
    assert forwards_of_attention(chip) == 2
    assert forwards_of_attention(chip, recompute) == 4
    assert forwards_of_attention(chip, recompute, "optim.remat_keeps=attention") == 2
