# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS as pure functions over a tree of parameters."""

from jaxmoe.config import ModelConfig
from jaxmoe.model.cache import KVCache, init_cache
from jaxmoe.model.config import gpt_oss_20b, gpt_oss_120b, tiny
from jaxmoe.model.critic import init_critic, values_after
from jaxmoe.model.forward import forward
from jaxmoe.model.head import next_token_logits, sequence_logprobs
from jaxmoe.model.ops import Ops, make_engine_ops, make_ops, plain_ops
from jaxmoe.model.params import abstract_params, count_params, init_params, param_specs

__all__ = [
    "KVCache",
    "ModelConfig",
    "Ops",
    "abstract_params",
    "count_params",
    "forward",
    "gpt_oss_120b",
    "gpt_oss_20b",
    "init_cache",
    "init_params",
    "make_engine_ops",
    "make_ops",
    "init_critic",
    "next_token_logits",
    "param_specs",
    "plain_ops",
    "sequence_logprobs",
    "values_after",
    "tiny",
]
