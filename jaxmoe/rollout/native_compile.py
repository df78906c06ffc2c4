# SPDX-License-Identifier: Apache-2.0
"""Compilation of the native engine's programs ahead of time, from shapes alone.

Next: jaxmoe/plan/sampler.py asks for them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import cast_for_forward
from jaxmoe.parallel.sharding import MeshRules, batch_sharding, param_shardings
from jaxmoe.records import Sampling
from jaxmoe.rollout.decoding import init_rows
from jaxmoe.shapes import Leaf, Params


def compile_full_batch(
    make: Callable[..., Any],
    sampling: Sampling,
    params: Params,
    *,
    prefill: Callable[..., Any],
    repeat: Callable[..., Any],
    decode: Callable[..., Any],
    cfg: ModelConfig,
    mesh: Mesh | None,
    rules: MeshRules,
    prompts: int,
    samples: int,
    longest: int,
    full_slots: int,
) -> tuple[Any, Any]:
    """Compile prefill and decode of a full batch of the longest prompts, as `generate` does.

    `make(jitted, *shapes, **static)` compiles, possibly for devices that are not present; `params`
    are the shapes of the trainer's weights. `prefill`, `repeat` and `decode` are jitted.
    """

    def with_shardings(tree: Leaf, shardings: Leaf) -> Leaf:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
        )

    def shard_rows(tree: Leaf) -> Leaf:
        if (row_mesh := mesh) is None:
            return tree
        return with_shardings(
            tree, jax.tree.map(lambda x: batch_sharding(row_mesh, x.ndim, rules), tree)
        )

    def result_shapes(program: Any) -> Any:
        return with_shardings(program.out_info, program.output_shardings)

    params = jax.eval_shape(partial(cast_for_forward, cfg=cfg), params)
    if mesh is not None:
        # A packed matrix is two arrays of one sharding.
        shardings = param_shardings(cfg, mesh, rules)
        params = with_shardings(params, jax.tree.broadcast(shardings, params))
    rows = prompts * samples
    shapes = [((prompts, longest), jnp.int32), ((prompts,), jnp.int32)]
    shapes += [((rows, cfg.d_model), jnp.dtype(cfg.dtype)), ((rows,), jnp.int32)]
    shapes += [((rows,), jnp.bool_), ((rows, 2), jnp.uint32), ((rows,), jnp.int32)]
    shapes += [((len(sampling.stop_ids),), jnp.int32), ((), jnp.float32), ((), jnp.int32)]
    shapes += [((), jnp.float32)]
    tokens, lengths, *fresh, stop_ids, temperature, step, exploration = (
        jax.ShapeDtypeStruct(*shape) for shape in shapes
    )
    prefill_program = make(
        prefill,
        params,
        *shard_rows((tokens, lengths)),
        step,
        exploration,
        full_slots=full_slots,
    )
    cache, _, prompt_experts = result_shapes(prefill_program)
    if samples > 1:
        cache = result_shapes(make(repeat, cache, samples=samples))
    state = shard_rows(
        jax.eval_shape(partial(init_rows, sampling=sampling), *fresh, prompt_experts)
    )
    decode_program = make(
        decode,
        params,
        replace(state, cache=cache),
        stop_ids,
        temperature,
        step,
        exploration,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        enough=0,
    )
    return prefill_program, decode_program
