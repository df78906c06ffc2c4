# SPDX-License-Identifier: Apache-2.0
"""A model of four-bit experts and adapters beside it, with sizes that tell axes apart."""

import jax
import jax.numpy as jnp

from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.config import LoraConfig, ModelConfig
from jaxmoe.model import init_params, plain_ops
from jaxmoe.model.lora import init_adapters
from jaxmoe.model.params import cast_for_forward
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense

CFG = ModelConfig(
    vocab_size=90,
    d_model=128,
    n_layers=2,
    n_q_heads=6,
    n_kv_heads=3,
    head_dim=16,
    n_experts=7,
    experts_per_token=3,
    d_expert=64,
    sliding_window=9,
    dtype="float32",
)
LORA = LoraConfig(attention_rank=4, expert_rank=3, attention_alpha=6.0, expert_alpha=4.5)
OPS = plain_ops()


def base_of(cfg=CFG):
    """Packed, with biases, sinks and norms that matter, as the forward reads it."""
    params = init_params(jax.random.key(0), cfg)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    leaves = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    packed, _ = pack_experts(jax.tree.unflatten(tree, leaves), cfg)
    return cast_for_forward(jax.tree.map(jnp.asarray, packed), cfg)


def adapters_of(cfg=CFG, lora=LORA):
    """Adapters as after some training: B is not zero."""
    adapters = init_adapters(jax.random.key(2), cfg, lora)
    return jax.tree.map(
        lambda x: x + 0.05 * jax.random.normal(jax.random.key(5), x.shape), adapters
    )


def dense(params):
    return jax.tree.map(
        lambda x: mxfp4_to_dense(x) if isinstance(x, Mxfp4) else x,
        params,
        is_leaf=lambda x: isinstance(x, Mxfp4),
    )
