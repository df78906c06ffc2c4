# SPDX-License-Identifier: Apache-2.0
"""Muon: updates of matrices are orthogonal, each matrix by itself. Back: jaxmoe/rl/optimizer.py.

Layers are stacked, and in a layer experts are, so the matrices of a parameter are its last two
axes; optax.contrib.muon would take only the embedding and the head for matrices.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey
from jaxtyping import Array, Float

from jaxmoe.shapes import Leaf

# x <- a·x + (b·xxᵀ + c·(xxᵀ)²)·x pulls every singular value towards 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalize(x: Float[Array, "*stack M N"]) -> Float[Array, "*stack M N"]:
    """U·S'·Vᵀ of each matrix U·S·Vᵀ, with S' between about 0.7 and 1.2.

    Five steps of Newton-Schulz; a matrix of zeros stays.
    Numerics: float32; the result has the dtype of x.
    Source: Jordan et al., Muon, 2024 (github.com/KellerJordan/Muon).
    """
    is_tall = x.shape[-2] > x.shape[-1]
    wide = (jnp.swapaxes(x, -2, -1) if is_tall else x).astype(jnp.float32)
    wide = wide / (jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = COEFFICIENTS

    def step(_: Any, y: Array) -> Array:
        gram = y @ jnp.swapaxes(y, -2, -1)
        return a * y + (b * gram + c * gram @ gram) @ y

    wide = lax.fori_loop(0, STEPS, step, wide)
    return (jnp.swapaxes(wide, -2, -1) if is_tall else wide).astype(x.dtype)


def scale_by_orthogonality() -> optax.GradientTransformation:
    """Return the transformation u -> 0.2·sqrt(max(M, N))·orthogonalize(u) of [..., M, N] matrices.

    The factor gives an update the root mean square of AdamW's, so that a learning rate and a
    weight decay suit both. The columns of `w_gate_up` are two matrices, gate and up.
    Source: arXiv:2502.16982 section 2.2.
    """

    def scale(x: Array) -> Array:
        return 0.2 * max(x.shape[-2:]) ** 0.5 * orthogonalize(x)

    def scale_parameter(path: Any, x: Array) -> Array:
        def scale_parts(x: Array) -> Array:
            parts = jnp.split(x, _count_side_by_side(path), axis=-1)
            return jnp.concatenate([scale(part) for part in parts], axis=-1)

        # Of experts, [index, E, M, N], a device computes those of one layer at a time.
        return lax.map(scale_parts, x) if x.ndim > 3 else scale_parts(x)

    def update(updates: Leaf, state: Leaf, params: Leaf = None) -> tuple[Leaf, Leaf]:
        return jax.tree_util.tree_map_with_path(scale_parameter, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_muon(
    schedule: optax.ScalarOrSchedule,
    adamw: optax.GradientTransformation,
    *,
    momentum: float,
    weight_decay: float,
    mask: Callable[[Leaf], Leaf] | None,
) -> optax.GradientTransformation:
    """Muon with Nesterov momentum for the matrices of layers, and `adamw` for other parameters.

    Those are embedding, head, biases, norms, sinks and a critic's value head.
    Source: Jordan et al., Muon, 2024; weight decay and scale of arXiv:2502.16982.
    """
    muon = optax.chain(
        optax.trace(momentum, nesterov=True),
        scale_by_orthogonality(),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": muon, "adamw": adamw}, label_parameters)


def label_parameters(params: Leaf) -> Leaf:
    """Return "muon" for matrices of layers, and "adamw" for all other parameters."""

    def label(path: Any, _: Any) -> str:
        names = [key.key for key in path if isinstance(key, DictKey)]
        return "muon" if "layers" in names and names[-1].startswith("w_") else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def muon_flops(params: Leaf) -> int:
    """FLOPs of the matrix products in an update of parameters with these shapes."""
    flops, labels = 0, jax.tree.leaves(label_parameters(params))
    for (path, x), label in zip(jax.tree_util.tree_leaves_with_path(params), labels, strict=True):
        if label == "muon":
            parts = _count_side_by_side(path)
            short, long = sorted((x.shape[-2], x.shape[-1] // parts))
            step = 4 * short**2 * long + 2 * short**3
            flops += parts * math.prod(x.shape[:-2]) * STEPS * step
    return flops


def _count_side_by_side(path: Any) -> int:
    """Number of matrices that share the rows of a parameter."""
    return 2 if path[-1] == DictKey("w_gate_up") else 1
