# SPDX-License-Identifier: Apache-2.0
"""A sum over rounds of which one is nearly always enough: memory for one, time for what there is.

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
