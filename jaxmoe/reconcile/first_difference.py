# SPDX-License-Identifier: Apache-2.0
"""Where two forwards that should give the same bits first do not: token, layer, tensor.

One is the trainer's, over the whole sequence; the other prefills its prompt and decodes one token
at a time, as the native engine does. Both keep every layer's routing by `Ops.record`.
Next: jaxmoe/guards.py says it where a run stops.
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

PARTS = {  # of a layer in the order they are computed, and what makes each of them
    "h": "the input of its experts (attention, and the two norms)",
    "indices": "its experts (router)",
    "weights": "its experts' weights (router)",
}


def first_difference(
    params: Params, tokens: np.ndarray, prompt_tokens: int, cfg: ModelConfig, ops: Ops, *,
    engine_ops: Ops | None = None,
) -> str | None:  # fmt: skip
    """The first token, and of it the first tensor, whose bits are not the same in both; in words.

    None where all are: then it is the batch that one of them was in, or the log-prob's own sums.
    `engine_ops` are the decoding side's where they are others.
    """
    ours = _whole(params, tokens, cfg, ops)
    theirs = _by_token(params, tokens, prompt_tokens, cfg, engine_ops or ops)
    for t in range(len(tokens)):
        for layer in range(cfg.n_layers):
            for name, what in PARTS.items():
                if not np.array_equal(ours[name][layer, t], theirs[name][layer, t]):
                    return f"token {t}, layer {layer}: {what}"
        if not np.array_equal(ours["hidden"][t], theirs["hidden"][t]):
            return f"token {t}: the final hidden state (experts of the last layer, final norm)"
    return None


def _kept(h_BTD: Array, layer: Params, indices_BTA: Array, weights_BTA: Array) -> dict[str, Array]:
    return {"h": h_BTD, "indices": indices_BTA, "weights": weights_BTA}


def _whole(params: Params, tokens: np.ndarray, cfg: ModelConfig, ops: Ops) -> dict[str, np.ndarray]:
    def run(params: Params, tokens_BT: Array) -> Any:
        hidden_BTD, _, kept = forward(params, tokens_BT, cfg, replace(ops, record=_kept))
        return kept | {"hidden": hidden_BTD}

    return _of_row(jax.jit(run)(params, jnp.asarray(tokens)[None]))


def _by_token(
    params: Params, tokens: np.ndarray, prompt_tokens: int, cfg: ModelConfig, ops: Ops
) -> dict[str, np.ndarray]:
    def run(params: Params, tokens_BT: Array, positions_BT: Array, cache: KVCache) -> Any:
        hidden_BTD, cache_after, kept = forward(
            params, tokens_BT, cfg, replace(ops, record=_kept), positions_BT=positions_BT,
            cache=cache,
        )  # fmt: skip
        return kept | {"hidden": hidden_BTD}, cache_after

    step, parts = jax.jit(run), []
    cache: Any = jax.jit(partial(init_cache, cfg, 1, len(tokens)))()
    ends = [prompt_tokens, *range(prompt_tokens + 1, len(tokens) + 1)]
    for start, end in zip([0, *ends], ends, strict=False):
        positions = np.arange(start, end, dtype=np.int32)[None]
        found, cache = step(params, jnp.asarray(tokens[start:end])[None], positions, cache)
        parts.append(_of_row(found))
    return {
        name: np.concatenate([p[name] for p in parts], axis=0 if name == "hidden" else 1)
        for name in parts[0]
    }


def _of_row(found: Any) -> dict[str, np.ndarray]:
    """Without the batch axis, which is behind that of layers where there is one."""
    return {name: np.asarray(x[:, 0] if name in PARTS else x[0]) for name, x in found.items()}
