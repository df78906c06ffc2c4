# SPDX-License-Identifier: Apache-2.0
"""Sums over rounds, of which one is nearly always enough, and loops over parts.

A buffer of fixed size does not fit every routing. The rows that do not fit are neither dropped nor
an error: they go through the same buffer in a further round. Next: jaxmoe/parallel/expert.py.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmoe.shapes import Leaf

Round = Callable[[Array, Leaf, Leaf], Array]  # (round number, operands, constants)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rounds(round_fn: Round, rounds: Array, operands: Leaf, constants: Leaf) -> Array:
    """Return Σ round_fn(k, operands, constants) over k < rounds, a traced number, and at least k =
    0.

    The first round is differentiated as usual; later ones are recomputed in the backward pass, so
    that neither pass stores more than one. Where a round has collectives, `rounds` must be the same
    on all devices. Only `operands` have gradients.
    Numerics: sums in the dtype of round_fn's result; with one round nothing is added.
    """
    return _add_later_rounds(
        round_fn, rounds, operands, constants, round_fn(jnp.int32(0), operands, constants)
    )


def _add_later_rounds(
    round_fn: Round, rounds: Array, operands: Leaf, constants: Leaf, first: Array
) -> Array:
    # A loop with a traced bound has no reverse-mode derivative, hence the custom vjp.
    return lax.fori_loop(1, rounds, lambda k, sum_: sum_ + round_fn(k, operands, constants), first)


def _rounds_forward(round_fn: Round, rounds: Array, operands: Leaf, constants: Leaf):
    first, pull = jax.vjp(lambda x: round_fn(jnp.int32(0), x, constants), operands)
    return _add_later_rounds(round_fn, rounds, operands, constants, first), (
        pull,
        rounds,
        operands,
        constants,
    )


def _rounds_backward(round_fn: Round, residuals: Leaf, dout: Array):
    pull, rounds, operands, constants = residuals

    def add_gradients(k: Array, grads: Leaf) -> Leaf:
        _, pull = jax.vjp(lambda x: round_fn(k, x, constants), operands)
        return jax.tree.map(jnp.add, grads, pull(dout)[0])

    return None, lax.fori_loop(1, rounds, add_gradients, pull(dout)[0]), None


sum_rounds.defvjp(_rounds_forward, _rounds_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def map_parts(
    part_fn: Callable[[Leaf, Leaf, Leaf], Array], tokens: Leaf, layer: Leaf, constants: Leaf
) -> Array:
    """Return part_fn(tokens[p], layer, constants[p]) of each part p, one after the other, stacked.

    The backward pass recomputes each part. Only `tokens` and `layer` have gradients.
    Numerics: the layer's gradients are added in float32 and round once.
    """
    return lax.map(lambda x: part_fn(x[0], layer, x[1]), (tokens, constants))


def _parts_forward(part_fn: Callable[..., Array], tokens: Leaf, layer: Leaf, constants: Leaf):
    return map_parts(part_fn, tokens, layer, constants), (tokens, layer, constants)


def _parts_backward(part_fn: Callable[..., Array], residuals: Leaf, dout: Array):
    tokens, layer, constants = residuals

    def add_gradients(sums: Leaf, part: Leaf) -> tuple[Leaf, Leaf]:
        tokens, constants, dout = part
        _, pull = jax.vjp(lambda tokens, layer: part_fn(tokens, layer, constants), tokens, layer)
        dtokens, dlayer = pull(dout)
        return jax.tree.map(lambda s, d: s + d.astype(jnp.float32), sums, dlayer), dtokens

    # In the layer's dtype each part would round the sum once more.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), layer)
    sums, dtokens = lax.scan(add_gradients, zeros, (tokens, constants, dout))
    return dtokens, jax.tree.map(lambda s, x: s.astype(x.dtype), sums, layer), None


map_parts.defvjp(_parts_forward, _parts_backward)
