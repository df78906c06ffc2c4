# SPDX-License-Identifier: Apache-2.0
"""Rows of a cache: repeated for the samples of a prompt, taken, and put back.

Next: jaxmoe/model/cache.py.
"""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxmoe.config import ModelConfig
from jaxmoe.model import KVCache, init_cache
from jaxmoe.model.cache import KVStack, PromptKeys
from jaxmoe.parallel.sharding import TRAINING, MeshRules, mesh_spec


def repeat_rows(cache: KVCache, samples: int) -> KVCache:
    """Return the cache with each row repeated `samples` times."""
    return _map_arrays(cache, lambda x, axis: jnp.repeat(x, samples, axis=axis))


def share_prompt_keys(
    cache: KVCache,
    samples: int,
    *,
    cfg: ModelConfig,
    slots: int,
    mesh: Mesh | None = None,
    rules: MeshRules = TRAINING,
) -> KVCache:
    """Return a cache for `samples` rows of each prompt, of which they read one copy.

    Only the full layers share, since the sliding layers store no more than a window. The rows can
    write `slots` tokens. Raises ValueError for a cache of `own_slots`.
    """
    if cache.used.ndim > 0:
        raise ValueError("the rows of a prompt must write together, got a count of slots for each.")
    full = {name: cache.stacks[name] for name, g in cfg.plan.groups.items() if not g.kind.window}
    rows = next(iter(cache.stacks.values())).positions_BC.shape[0] * samples
    new = init_cache(cfg, rows, slots).stacks
    shared = KVCache(
        stacks={
            name: new[name]
            if name in full
            else _map_stack(stack, lambda x, axis: jnp.repeat(x, samples, axis=axis))
            for name, stack in cache.stacks.items()
        },
        used=jnp.zeros_like(cache.used),
        next_slot=cache.next_slot,
        prompts={name: PromptKeys(stack, None, samples) for name, stack in full.items()},
    )
    if mesh is None:
        return shared

    def shard_rows(x: Array, axis: int) -> Array:
        # New arrays take over no sharding: XLA would put all rows on every device.
        spec = mesh_spec(*[()] * axis, rules.rows)
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return _map_arrays(shared, shard_rows)


def take_rows(cache: KVCache, rows: Array) -> KVCache:
    """Return the cache of the rows with these indices, and of their prompts."""
    smaller = _map_arrays(cache, lambda x, axis: jnp.take(x, rows, axis=axis))
    prompts = {name: _take_prompts(prompt, rows) for name, prompt in cache.prompts.items()}
    return replace(smaller, prompts=prompts)


def _take_prompts(prompt: PromptKeys, rows: Array) -> PromptKeys:
    """The prompts of these rows. Where several rows have one prompt, some prompt is repeated and
    has no row, so that the shapes do not depend on the indices."""
    place_B = rows if prompt.place_B is None else prompt.place_B[rows]
    n_prompts = min(prompt.stack.positions_BC.shape[0], rows.shape[0])
    prompts, prompt_B = jnp.unique(
        place_B // prompt.samples, return_inverse=True, size=n_prompts, fill_value=None
    )
    stack = _map_stack(prompt.stack, lambda x, axis: jnp.take(x, prompts, axis=axis))
    place_B = prompt_B * prompt.samples + place_B % prompt.samples
    return PromptKeys(stack, place_B.astype(jnp.int32), prompt.samples)


def put_rows(cache: KVCache, part: KVCache, rows: Array) -> KVCache:
    """Return the cache with the rows at these indices replaced by those of `part`."""

    def put_stack(k: KVStack, new: KVStack) -> KVStack:
        return replace(
            k,
            k=k.k.at[:, rows].set(new.k),
            v=k.v.at[:, rows].set(new.v),
            positions_BC=k.positions_BC.at[rows].set(new.positions_BC),
            segments_BC=k.segments_BC.at[rows].set(new.segments_BC),
        )

    return replace(
        cache,
        stacks={name: put_stack(stack, part.stacks[name]) for name, stack in cache.stacks.items()},
        used=cache.used.at[rows].set(part.used),
        next_slot=cache.next_slot.at[rows].set(part.next_slot),
    )


def empty_rows(cache: KVCache, emptied_B: Array) -> KVCache:
    """Return the cache with some rows as before their first token; each has a count of slots."""
    stacks = {
        name: replace(stack, segments_BC=jnp.where(emptied_B[:, None], 0, stack.segments_BC))
        for name, stack in cache.stacks.items()
    }
    used, next_slot = (jnp.where(emptied_B, 0, x) for x in (cache.used, cache.next_slot))
    return replace(cache, stacks=stacks, used=used, next_slot=next_slot)


def _map_arrays(cache: KVCache, fn: Callable[[Array, int], Array]) -> KVCache:
    """Apply fn(array, axis of rows) to all arrays but those of the prompts."""
    return replace(
        cache,
        stacks={name: _map_stack(stack, fn) for name, stack in cache.stacks.items()},
        used=cache.used if cache.used.ndim == 0 else fn(cache.used, 0),
        next_slot=cache.next_slot if cache.next_slot.ndim == 0 else fn(cache.next_slot, 0),
    )


def _map_stack(stack: KVStack, fn: Callable[[Array, int], Array]) -> KVStack:
    return KVStack(
        k=fn(stack.k, 1),
        v=fn(stack.v, 1),
        positions_BC=fn(stack.positions_BC, 0),
        segments_BC=fn(stack.segments_BC, 0),
    )
