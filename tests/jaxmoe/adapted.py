# SPDX-License-Identifier: Apache-2.0
"""A model of four-bit experts and adapters beside it, with sizes that tell axes apart."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.config import LoraConfig
from jaxmoe.model import plain_ops
from jaxmoe.model.lora import init_adapters
from jaxmoe.model.params import cast_for_forward
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from tests.jaxmoe.random_weights import random_weights
from tests.jaxmoe.small_models import SEVEN_EXPERTS

CFG = replace(SEVEN_EXPERTS, vocab_size=90, d_model=128, experts_per_token=3, d_expert=64)
LORA = LoraConfig(attention_rank=4, expert_rank=3, attention_alpha=6.0, expert_alpha=4.5)
OPS = plain_ops()


def base_of(cfg=CFG):
    """Packed, with biases, sinks and norms that matter, as the forward reads it."""
    packed, _ = pack_experts(random_weights(cfg, 0), cfg)
    return cast_for_forward(jax.tree.map(jnp.asarray, packed), cfg)


def adapters_of(cfg=CFG, lora=LORA):
    """Adapters as after some training: B is not zero."""
    shapes = jax.eval_shape(partial(init_adapters, cfg=cfg, lora=lora), jax.random.key(2))
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), jnp.float32), shapes)


def dense(params):
    return jax.tree.map(
        lambda x: mxfp4_to_dense(x) if isinstance(x, Mxfp4) else x,
        params,
        is_leaf=lambda x: isinstance(x, Mxfp4),
    )
