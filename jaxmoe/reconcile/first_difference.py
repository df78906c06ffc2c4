# SPDX-License-Identifier: Apache-2.0
"""The first token, layer and tensor in which two forwards differ that should be equal to the bit.

One forward is the trainer's, over the full sequence. The other prefills the prompt and decodes one
token at a time, as the native engine does. Both record every layer's routing through `Ops.record`.
Next: jaxmoe/run/guards.py reports it when a run stops.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.config import ModelConfig
from jaxmoe.model import KVCache, Ops, forward, init_cache
from jaxmoe.shapes import Params

PARTS = {  # recorded tensors of a layer in order, with the ops that make them
    "h": "the input of its experts (attention, and the two norms)",
    "indices": "its experts (router)",
    "weights": "its experts' weights (router)",
}


def find_first_difference(
    params: Params,
    tokens: np.ndarray,
    prompt_tokens: int,
    cfg: ModelConfig,
    ops: Ops,
    *,
    engine_ops: Ops | None = None,
    step: int = 0,
) -> str | None:
    """Return a description of the first token, and its first tensor, whose bits differ.

    None if all are equal: then the cause is the other rows of a batch, or the sums of the log-prob.
    `engine_ops` are the decoding side's ops, if they differ; `step` is the number of RL steps
    behind the params, for a router that takes a context.
    """
    trainer = _run_sequence(params, tokens, cfg, ops, step)
    engine = _run_by_token(params, tokens, prompt_tokens, cfg, engine_ops or ops, step)
    for t in range(len(tokens)):
        for layer in range(cfg.n_layers):
            for name, cause in PARTS.items():
                if not np.array_equal(trainer[name][layer, t], engine[name][layer, t]):
                    return f"token {t}, layer {layer}: {cause}"
        if not np.array_equal(trainer["hidden"][t], engine["hidden"][t]):
            return f"token {t}: the final hidden state (experts of the last layer, final norm)"
    return None


def _record_layer(
    h_BTD: Array, layer: Params, indices_BTA: Array, weights_BTA: Array
) -> dict[str, Array]:
    return {"h": h_BTD, "indices": indices_BTA, "weights": weights_BTA}


def _run_sequence(
    params: Params, tokens: np.ndarray, cfg: ModelConfig, ops: Ops, step: int
) -> dict[str, np.ndarray]:
    def run_forward(params: Params, tokens_BT: Array) -> Any:
        hidden_BTD, _, recorded = forward(
            params, tokens_BT, cfg, replace(ops, record=_record_layer), step=jnp.int32(step)
        )
        return recorded | {"hidden": hidden_BTD}

    return _drop_batch_axis(jax.jit(run_forward)(params, jnp.asarray(tokens)[None]))


def _run_by_token(
    params: Params, tokens: np.ndarray, prompt_tokens: int, cfg: ModelConfig, ops: Ops, step: int
) -> dict[str, np.ndarray]:
    def run_step(params: Params, tokens_BT: Array, positions_BT: Array, cache: KVCache) -> Any:
        hidden_BTD, cache_after, recorded = forward(
            params,
            tokens_BT,
            cfg,
            replace(ops, record=_record_layer),
            positions_BT=positions_BT,
            cache=cache,
            step=jnp.int32(step),
        )
        return recorded | {"hidden": hidden_BTD}, cache_after

    run, parts = jax.jit(run_step), []
    cache: Any = jax.jit(partial(init_cache, cfg, 1, len(tokens)))()
    ends = [prompt_tokens, *range(prompt_tokens + 1, len(tokens) + 1)]
    for start, end in zip([0, *ends], ends, strict=False):
        positions = np.arange(start, end, dtype=np.int32)[None]
        recorded, cache = run(params, jnp.asarray(tokens[start:end])[None], positions, cache)
        parts.append(_drop_batch_axis(recorded))
    return {
        name: np.concatenate([p[name] for p in parts], axis=0 if name == "hidden" else 1)
        for name in parts[0]
    }


def _drop_batch_axis(recorded: Any) -> dict[str, np.ndarray]:
    """Drop the batch axis, which is axis 1 of per-layer tensors and axis 0 of the hidden states."""
    return {name: np.asarray(x[:, 0] if name in PARTS else x[0]) for name, x in recorded.items()}
