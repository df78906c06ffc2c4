# SPDX-License-Identifier: Apache-2.0
"""Memory of the native engine, computed from shapes.

Next: jaxmoe/run/memory.py adds the trainer's.
"""

from functools import cache

import jax

from jaxmoe.config import Config, ModelConfig
from jaxmoe.config.engine import EngineMemory
from jaxmoe.model import KVCache, init_cache
from jaxmoe.model.cache import cache_bytes
from jaxmoe.model.weights import weights_of
from jaxmoe.parallel.param_bytes import engine_bytes
from jaxmoe.parallel.sharding import sampling_rules
from jaxmoe.rollout.cache_rows import share_prompt_keys
from jaxmoe.rollout.native_prompts import prompt_slots, prompts_per_batch, shares_prompt_keys
from jaxmoe.rollout.native_turns import shrunk_size


def plan_native_memory(cfg: Config) -> EngineMemory:
    """Return the bytes of the engine's copy of the weights, and of its caches, on each device.

    An evaluation answers each prompt once, greedily, so none of its keys are shared.
    """
    # A frozen base is read without a copy.
    weights = engine_bytes(weights_of(cfg).trained, cfg, sampling_rules(cfg.model).rules)
    samples = cfg.rollout.samples_per_prompt
    cache = _flow_cache_bytes(cfg) if cfg.rollout.changes_in_flight else _batch_bytes(cfg, samples)
    evaluation = max(_batch_bytes(cfg, n) for n in (1, cfg.eval.samples_per_prompt))
    return EngineMemory(weights=weights, cache=cache, evaluation_cache=evaluation)


def _count_prompts(cfg: Config, samples: int) -> int:
    """Prompts of a batch on one device."""
    shards = cfg.mesh.row_shards * cfg.mesh.sequence
    return prompts_per_batch(cfg.rollout.max_parallel_sequences, samples, shards) // shards


def _flow_cache_bytes(cfg: Config) -> int:
    """Bytes of the cache of rows that are refilled one by one."""
    r, prompt = cfg.rollout, prompt_slots(cfg.data.max_prompt_tokens)
    rows = _count_prompts(cfg, r.samples_per_prompt) * r.samples_per_prompt
    slots = cfg.read_context if cfg.has_environment else prompt + r.max_new_tokens
    # A part of the rows twice: as it was prefilled, and as it is put to its places.
    parts = 2 * cache_bytes(cfg.model, shrunk_size(rows), slots)
    return cache_bytes(cfg.model, rows, slots) + parts


def _batch_bytes(cfg: Config, samples: int) -> int:
    """Bytes of the cache of a batch with so many samples of each prompt."""
    r, prompts = cfg.rollout, _count_prompts(cfg, samples)
    if not cfg.has_environment:
        return rows_cache_bytes(cfg, prompts, r.max_new_tokens, samples)
    rows = prompts * samples
    cache = cache_bytes(cfg.model, rows, cfg.read_context)
    if cfg.mesh.devices == 1:
        # Rows that return keep their cache while a small batch continues with a copy.
        batches = r.groups_at_once if r.schedule == "groups" else 1
        cache += batches * cache_bytes(cfg.model, shrunk_size(rows // batches), cfg.read_context)
    return cache


def rows_cache_bytes(cfg: Config, prompts: int, answer_tokens: int, samples: int = 0) -> int:
    """Bytes of the cache of all samples of `prompts` prompts, with so many tokens of an answer.

    samples: of each prompt; 0 for those of a step.
    """
    prompt = prompt_slots(cfg.data.max_prompt_tokens)
    samples = samples or cfg.rollout.samples_per_prompt
    if not shares_prompt_keys(
        cfg.model, prompt, cfg.rollout.max_new_tokens, samples, is_episode=cfg.has_environment
    ):
        return cache_bytes(cfg.model, prompts * samples, prompt + answer_tokens)
    return _shared_cache_bytes(cfg.model, prompts, samples, prompt, answer_tokens)


@cache
def _shared_cache_bytes(
    cfg: ModelConfig, prompts: int, samples: int, prompt_slots: int, answer_tokens: int
) -> int:
    def init_shared() -> KVCache:
        keys = init_cache(cfg, prompts, prompt_slots + answer_tokens, prompt_slots)
        return share_prompt_keys(keys, samples, cfg=cfg, slots=answer_tokens)

    leaves = jax.tree.leaves(jax.eval_shape(init_shared))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
