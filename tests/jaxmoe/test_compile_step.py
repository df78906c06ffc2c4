# SPDX-License-Identifier: Apache-2.0
"""The whole RL step with every kernel, by config alone, through the chips' own compilers.

GPT-OSS 20B's width and vocabulary, one pair of layers, two sequences of 4,096 tokens. Nothing is
executed. `-s` prints what docs/kernels.md says of it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.config import Config, DataConfig, OptimConfig, RolloutConfig
from jaxmoe.config_file import override
from jaxmoe.model import abstract_params, make_ops
from jaxmoe.model.config import gpt_oss_20b
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.from_config import algorithm
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import rl_state
from jaxmoe.rl.update import rl_step
from pallas_kernels.ahead_of_time import GPUS, compile_for, missing

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.timeout(3600)]

CFG = override(
    Config(
        model=gpt_oss_20b(),
        data=DataConfig(task="reasoning_gym:spell_backward", max_prompt_tokens=2048),
        rollout=RolloutConfig(sequences_per_step=2, samples_per_prompt=2, max_new_tokens=2048),
        optim=OptimConfig(lr=1e-6, param_dtype="bfloat16"),
        steps=1,
    ),
    "model.n_layers=2",
)  # fmt: skip


def compiled_step(chip, kernels):
    """`rl_step` of the config, and nothing patched."""
    cfg = override(CFG, f"kernels={kernels}")
    tx, shape = rl_optimizer(cfg), (cfg.rollout.sequences_per_step, cfg.context)

    def array(dtype, shape=shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = Batch(
        tokens_BT=array(jnp.int32), positions_BT=array(jnp.int32), segment_ids_BT=array(jnp.int32),
        loss_mask_BT=array(jnp.bool_), rollout_logp_BT=array(jnp.float32),
        rewards_B=array(jnp.float32, shape[:1]), samples_per_prompt=2,
    )  # fmt: skip
    policy = abstract_params(cfg.model, cfg.optim.param_dtype)
    state = jax.eval_shape(lambda p: rl_state(p, cfg, tx), policy)
    step = partial(
        rl_step, tx=tx, algorithm=algorithm(cfg), scorer=Scorer(cfg.model, make_ops(cfg)),
        gate=cfg.gate,
    )  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):
        return compile_for(chip, step, state, batch, donate=(0,))


def told(chip, kernels, found, calls):
    analysis = found.executable.memory_analysis()
    held = f"{1e-9 * analysis.argument_size_in_bytes:.2f} GB of arguments" if analysis else ""
    print(
        f"{chip} {kernels}: {calls} kernels called, {1e-9 * found.temp_bytes:.2f} GB beside {held}"
    )


# attention 1 + 2, gate and up 1 + 3, down 1 + 2 in each of two layers; log-probs 1 + 2 or more
LEAST = 2 * (3 + 3 + 3) + 3


@pytest.mark.parametrize("chip", ["h200", "v5p", "v6e"])
def test_the_step_of_a_config_compiles_with_every_kernel_and_in_less_memory(chip):
    if reason := missing(chip):
        pytest.skip(reason)
    kernels = "mosaic_gpu" if chip in GPUS else "mosaic_tpu"
    found = compiled_step(chip, kernels)
    calls = found.mosaic_calls if chip in GPUS else len(found.vmem_bytes)
    told(chip, kernels, found, calls)
    assert calls >= LEAST
    for kernel in found.kernels:
        assert kernel.spills == 0 and kernel.stack == 0, kernel
    plain = compiled_step(chip, "xla")
    told(chip, "xla", plain, plain.mosaic_calls + len(plain.vmem_bytes))
    assert plain.mosaic_calls == len(plain.vmem_bytes) == 0
    assert found.temp_bytes < plain.temp_bytes
