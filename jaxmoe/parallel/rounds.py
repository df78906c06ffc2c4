# SPDX-License-Identifier: Apache-2.0
"""Memory for one, time for all: sums over rounds of which one is nearly always enough, and parts.

A buffer of fixed size cannot hold every routing. What does not fit is neither dropped nor an
error: it goes through the same buffer in a further round. Next: jaxmoe/parallel/expert.py.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmoe.shapes import Leaf

Round = Callable[[Array, Leaf, Leaf], Array]  # of the number of the round


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(one: Round, rounds: Array, operands: Leaf, where: Leaf) -> Array:
    """Σ one(k, operands, where) over k < rounds, a traced number, and always over k = 0.

    The first round is differentiated as any function is; later ones are computed again in the
    backward pass, so that neither pass holds more than one. Where a round has collectives,
    `rounds` must be the same on all devices. Gradients are of `operands` alone.
    Numerics: sums in the dtype of what is summed; with one round nothing is added.
    """
    return _later(one, rounds, operands, where, one(jnp.int32(0), operands, where))


def _later(one: Round, rounds: Array, operands: Leaf, where: Leaf, first: Array) -> Array:
    return lax.fori_loop(1, rounds, lambda k, sum_: sum_ + one(k, operands, where), first)


def _forward(one: Round, rounds: Array, operands: Leaf, where: Leaf):
    first, pull = jax.vjp(lambda x: one(jnp.int32(0), x, where), operands)
    return _later(one, rounds, operands, where, first), (pull, rounds, operands, where)


def _backward(one: Round, residuals: Leaf, dout: Array):
    pull, rounds, operands, where = residuals

    def again(k: Array, grads: Leaf) -> Leaf:
        _, pull = jax.vjp(lambda x: one(k, x, where), operands)
        return jax.tree.map(jnp.add, grads, pull(dout)[0])

    return None, lax.fori_loop(1, rounds, again, pull(dout)[0]), None


in_rounds.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_parts(
    one: Callable[[Leaf, Leaf, Leaf], Array], tokens: Leaf, layer: Leaf, where: Leaf
) -> Array:
    """one(tokens[p], layer, where[p]) of each part p, one after the other, stacked.

    The backward pass computes each part again. Gradients are of `tokens` and `layer`.
    Numerics: the layer's gradients are added in float32 and round once.
    """
    return lax.map(lambda x: one(x[0], layer, x[1]), (tokens, where))


def _parts_forward(one: Callable[..., Array], tokens: Leaf, layer: Leaf, where: Leaf):
    return in_parts(one, tokens, layer, where), (tokens, layer, where)


def _parts_backward(one: Callable[..., Array], residuals: Leaf, dout: Array):
    tokens, layer, where = residuals

    def again(sums: Leaf, part: Leaf) -> tuple[Leaf, Leaf]:
        tokens, where, dout = part
        _, pull = jax.vjp(lambda tokens, layer: one(tokens, layer, where), tokens, layer)
        dtokens, dlayer = pull(dout)
        return jax.tree.map(lambda s, d: s + d.astype(jnp.float32), sums, dlayer), dtokens

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), layer)
    sums, dtokens = lax.scan(again, zeros, (tokens, where, dout))
    return dtokens, jax.tree.map(lambda s, x: s.astype(x.dtype), sums, layer), None


in_parts.defvjp(_parts_forward, _parts_backward)
