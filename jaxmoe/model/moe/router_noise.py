# SPDX-License-Identifier: Apache-2.0
"""Exploration of experts in rollouts: noise on the logits by which the router selects.

The noise is a hash of the token's hidden state, the layer, the step and a seed, so that it needs no
random key, whose shape would differ between prefill and decode. Equal prefixes get equal noise, and
samples of a prompt explore apart from the first token in which they differ. An engine records the
experts, and the trainer replays them (router.replay=R3): a token's weights come from the logits
without noise, so that both compute the same policy.
Next: jaxmoe/model/moe/router.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxmoe.model.moe.router import RouterContext, router_dot, router_logits
from jaxmoe.shapes import Params

Noise = Callable[[Array], Array]  # two uniform values in (0, 1) along the last axis -> one of noise


def route_with_noise(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    context: RouterContext,
    noise: Noise,
    scale: float,
    seed: int = 0,
    product: Callable[..., Array] = router_dot,
) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
    """Select by logits + scale·exploration·noise, and weight by the logits alone.

    `context.exploration` is 1 in the rollouts of a step and 0 elsewhere, where the experts are
    those of `route_top_k`. `scale` is in units of a logit.
    """
    logits_BTE = router_logits(h_BTD, layer, product)
    n_experts = logits_BTE.shape[-1]
    uniform_BTE2 = hash_uniform(h_BTD, n_experts, (context.step, context.layer, seed))
    noisy_BTE = logits_BTE + scale * context.exploration * noise(uniform_BTE2)
    indices_BTA = lax.top_k(noisy_BTE, active)[1]
    top_BTA = jnp.take_along_axis(logits_BTE, indices_BTA, axis=-1)
    return indices_BTA, jax.nn.softmax(top_BTA, axis=-1)


def normal_noise(uniform_2: Float[Array, "*rest 2"]) -> Float[Array, "*rest"]:
    """Return standard normal values (Box and Muller)."""
    radius = jnp.sqrt(-2.0 * jnp.log(uniform_2[..., 0]))
    return radius * jnp.cos(2.0 * np.pi * uniform_2[..., 1])


def gumbel_noise(uniform_2: Float[Array, "*rest 2"]) -> Float[Array, "*rest"]:
    """Return standard Gumbel values.

    With scale 1 the selection is a sample without replacement from the softmax over all experts.
    """
    return -jnp.log(-jnp.log(uniform_2[..., 0]))


def hash_uniform(
    h_BTD: Float[Array, "B T D"], n_experts: int, salts: tuple[Array | int, ...]
) -> Float[Array, "B T E 2"]:
    """Return two values in (0, 1) per token and expert: a hash of the bits of h and the salts.

    Other bits of h, such as those of another batch in fast numerics, give other noise.
    """
    bits_BTD = lax.bitcast_convert_type(h_BTD.astype(jnp.float32), jnp.uint32)
    multipliers_D = jnp.arange(h_BTD.shape[-1], dtype=jnp.uint32) * np.uint32(
        2654435761
    ) | np.uint32(1)
    # A sum of integers that wraps around is the same in any order.
    hashed_BT = jnp.sum(mix_bits(bits_BTD) * multipliers_D[None, None], axis=-1, dtype=jnp.uint32)
    for salt in salts:
        hashed_BT = mix_bits(hashed_BT ^ mix_bits(jnp.asarray(salt).astype(jnp.uint32)))
    counter_E2 = jnp.arange(2 * n_experts, dtype=jnp.uint32).reshape(n_experts, 2)
    mixed_BTE2 = mix_bits(
        hashed_BT[..., None, None] ^ mix_bits(counter_E2 + np.uint32(1))[None, None]
    )
    # 23 bits and a half are exact in float32; the half keeps 0 and 1 out.
    return ((mixed_BTE2 >> 9).astype(jnp.float32) + 0.5) * np.float32(2.0**-23)


def mix_bits(x: UInt[Array, "*rest"]) -> UInt[Array, "*rest"]:
    """Return a hash of each uint32 in which every input bit flips about half of the output bits.

    Source: the finalizer of MurmurHash3.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


NOISES: dict[str, Noise] = {"normal": normal_noise, "gumbel": gumbel_noise}
