# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts so small that all of its answers can be enumerated.

The forward is that of jaxmoe.model, with every expert computed for every token, so that soft
routing costs nothing. With three tokens and answers of length T there are 3^T answers; expectations
over them are sums, without sampling error. Next: studies/float64.py.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model import forward, plain_ops
from jaxmoe.model.moe.router import (
    RouterContext,
    record_experts,
    record_router_logits,
    router_logits,
)
from jaxmoe.model.params import init_params
from jaxmoe.shapes import Params
from pallas_kernels import sink_attention
from pallas_kernels.grouped_matmul.swiglu import clamped_swiglu

N_WORDS = 3
STEP = 1  # of the run, for routers that are annealed: half of two steps
HEAD_SCALE, DOWN_SCALE = 1.5, 0.5  # of the initial weights: a peaked policy, moderate experts


@dataclass(frozen=True)
class MicroSizes:
    """Sizes of a micro model and of its answers."""

    length: int = 5
    n_experts: int = 8
    active: int = 2
    n_layers: int = 2

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=N_WORDS,
            d_model=16,
            n_layers=self.n_layers,
            n_q_heads=2,
            n_kv_heads=2,
            head_dim=8,
            n_experts=self.n_experts,
            experts_per_token=self.active,
            d_expert=8,
            sliding_window=32,
            dtype="float32",
            rope_theta=100.0,
            rope_factor=1.0,
        )


@dataclass(frozen=True)
class Answers:
    """All answers of one length, each a row behind the same first token.

    A log-prob of a token depends on its prefix alone, so 3^T answers of T tokens have only
    3 + 9 + … + 3^T different ones: the pairs of prefix and token.
    """

    length: int

    @cached_property
    def tokens_BT(self) -> np.ndarray:
        return np.array(list(itertools.product(range(N_WORDS), repeat=self.length)), np.int32)

    @cached_property
    def inputs_BT(self) -> np.ndarray:
        """Input tokens: the input at t predicts answer token t."""
        return np.pad(self.tokens_BT[:, :-1], ((0, 0), (1, 0)))

    @cached_property
    def prefixes_BT(self) -> np.ndarray:
        """Number of the prefix before each answer token."""
        sizes = np.array([(N_WORDS**t - 1) // (N_WORDS - 1) for t in range(self.length)])
        codes = np.zeros((len(self.tokens_BT), self.length), np.int64)
        for t in range(1, self.length):
            codes[:, t] = codes[:, t - 1] * N_WORDS + self.tokens_BT[:, t - 1]
        return codes + sizes

    @cached_property
    def pairs_BT(self) -> np.ndarray:
        """Number of each answer token's pair of prefix and token."""
        return self.prefixes_BT * N_WORDS + self.tokens_BT

    @cached_property
    def pair_places_P2(self) -> np.ndarray:
        """Row and column of one token of each pair."""
        _, first = np.unique(self.pairs_BT, return_index=True)
        return np.stack(np.unravel_index(first, self.pairs_BT.shape), axis=-1)

    @property
    def n_prefixes(self) -> int:
        return int(self.prefixes_BT.max()) + 1


def make_micro_params(seed: int, sizes: MicroSizes) -> Params:
    """Return the random weights of one policy."""
    params = init_params(jax.random.key(seed), sizes.config)

    def scale_leaf(path: Any, x: Array) -> Array:
        name = jax.tree_util.keystr(path)
        if "w_down" in name:
            return x * DOWN_SCALE
        return x * HEAD_SCALE if "head" in name else x

    return jax.tree_util.tree_map_with_path(scale_leaf, params)


def make_rewards(seed: int, answers: Answers) -> np.ndarray:
    """Return each answer's reward: the share of right tokens, and 0.5 more if all are right."""
    target_T = np.random.default_rng((seed, answers.length)).integers(0, N_WORDS, answers.length)
    is_right_BT = answers.tokens_BT == target_T
    return is_right_BT.mean(axis=1) + 0.5 * is_right_BT.all(axis=1)


def apply_all_experts(
    h_BTD: Float[Array, "B T D"],
    indices_BTA: Int[Array, "B T A"],
    weights_BTA: Float[Array, "B T A"],
    layer: Params,
    cfg: ModelConfig,
) -> Float[Array, "B T D"]:
    """Return the same as `jaxmoe.model.moe.experts.apply_experts`, computed for all experts."""
    is_expert_BTAE = indices_BTA[..., None] == jnp.arange(cfg.n_experts)[None, None, None]
    weights_BTE = jnp.sum(jnp.where(is_expert_BTAE, weights_BTA[..., None], 0.0), axis=2)
    gate_up_BTEF = jnp.einsum("btd,edf->btef", h_BTD, layer["w_gate_up"])
    gate_up_BTEF = gate_up_BTEF + layer["b_gate_up"][None, None]
    gate_up_MF = gate_up_BTEF.reshape(-1, gate_up_BTEF.shape[-1])
    hidden_MF = clamped_swiglu(gate_up_MF, cfg.swiglu_alpha, cfg.swiglu_limit)
    hidden_BTEF = hidden_MF.reshape(*gate_up_BTEF.shape[:-1], -1)
    out_BTED = jnp.einsum("btef,efd->bted", hidden_BTEF, layer["w_down"])
    out_BTED = out_BTED + layer["b_down"][None, None]
    return jnp.einsum("bted,bte->btd", out_BTED, weights_BTE)


def route_by_noisy_logits(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    context: RouterContext,
    noise_LBTE: Float[Array, "L B T E"],
) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
    """Select experts by logits + noise, and weight them by the logits alone."""
    logits_BTE = router_logits(h_BTD, layer)
    indices_BTA = lax.top_k(logits_BTE + noise_LBTE[context.layer], active)[1]
    top_BTA = jnp.take_along_axis(logits_BTE, indices_BTA, axis=-1)
    return indices_BTA, jax.nn.softmax(top_BTA, axis=-1)


def record_routing(
    h_BTD: Array, layer: Params, indices_BTA: Array, weights_BTA: Array
) -> dict[str, Array]:
    """Return the experts and the router's logits."""
    experts = record_experts(h_BTD, layer, indices_BTA, weights_BTA)
    return experts | record_router_logits(h_BTD, layer)


def answer_logprobs(
    params: Params,
    inputs_BT: Int[Array, "B T"],
    tokens_BT: Int[Array, "B T"],
    cfg: ModelConfig,
    router: Callable[..., Any],
    routed_BTLA: Int[Array, "B T L A"] | None = None,
) -> tuple[Float[Array, "B T"], dict[str, Array]]:
    """Return the log-prob of each answer token, and the router's logits and experts by layer.

    Answers do not share the prompt, as noise and replayed experts are given for each of them.
    """
    ops = replace(
        plain_ops(),
        router=router,
        experts=apply_all_experts,
        attend=partial(sink_attention, impl="reference"),
        record=record_routing,
    )
    hidden_BTD, _, recorded = forward(
        params, inputs_BT, cfg, ops, routed_experts_BTLA=routed_BTLA, step=jnp.int32(STEP)
    )
    logp_BTV = jax.nn.log_softmax(ops.logits(hidden_BTD, params["head"]), axis=-1)
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[..., None], axis=-1)[..., 0]
    return logp_BT, {
        "experts_BTLA": jnp.moveaxis(recorded["experts_BTA"], 0, 2),
        "router_logits_BTLE": jnp.moveaxis(recorded["router_logits_BTE"], 0, 2),
    }
