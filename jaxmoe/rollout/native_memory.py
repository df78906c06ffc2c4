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
    """Return the bytes of the engine's copy of the weights, and of its cache, on each device."""
    r, mesh = cfg.rollout, cfg.mesh
    # A frozen base is read without a copy.
    weights = engine_bytes(weights_of(cfg).trained, cfg, sampling_rules(cfg.model).rules)
    shards = mesh.row_shards * mesh.sequence
    prompts = prompts_per_batch(r.max_parallel_sequences, r.samples_per_prompt, shards)
    rows = prompts // shards * r.samples_per_prompt
    if r.changes_in_flight:
        prompt = prompt_slots(cfg.data.max_prompt_tokens)
        slots = cfg.read_context if cfg.has_environment else prompt + r.max_new_tokens
        # A part of the rows twice: as it was prefilled, and as it is put to its places.
        parts = 2 * cache_bytes(cfg.model, shrunk_size(rows), slots)
        return EngineMemory(weights=weights, cache=cache_bytes(cfg.model, rows, slots) + parts)
    if not cfg.has_environment:
        cache = rows_cache_bytes(cfg, prompts // shards, r.max_new_tokens)
        return EngineMemory(weights=weights, cache=cache)
    cache = cache_bytes(cfg.model, rows, cfg.read_context)
    if mesh.devices == 1:
        # Rows that return keep their cache while a small batch continues with a copy.
        batches = r.groups_at_once if r.schedule == "groups" else 1
        cache += batches * cache_bytes(cfg.model, shrunk_size(rows // batches), cfg.read_context)
    return EngineMemory(weights=weights, cache=cache)


def rows_cache_bytes(cfg: Config, prompts: int, answer_tokens: int) -> int:
    """Bytes of the cache of all samples of `prompts` prompts, with so many tokens of an answer."""
    prompt, samples = prompt_slots(cfg.data.max_prompt_tokens), cfg.rollout.samples_per_prompt
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
