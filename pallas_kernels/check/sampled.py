# SPDX-License-Identifier: Apache-2.0
"""Some rows of a call: what the reference can compute of a size that it cannot hold.

With cotangents that are 0 outside the sampled rows every gradient is the reference's over those
rows alone, gradients of what all rows share (keys, matrices, the head) included.
Next: one.py.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

SCORES = 2**26  # entries of the reference's largest array, about
ROWS = 256


class Axis(NamedTuple):
    """Where an operation has its rows."""

    inputs: tuple[int, ...]  # those that have one entry for each row
    axis: int  # of the inputs, and of the results that have rows
    results: tuple[str, ...]
    sizes: int | None = None  # the input that says how many rows each group has


_ATTENTION = Axis((0, 4, 6), 1, ("o", "lse", "dq"))
_MATMUL = Axis((0,), 0, ("out", "dlhs"), sizes=3)
AXES = {
    "sink_attention": _ATTENTION,
    "decode_attention": _ATTENTION,
    "grouped_matmul": _MATMUL,
    "grouped_swiglu": _MATMUL,
    "token_logprobs": Axis((0, 2), 0, ("logp", "entropy", "dhidden")),
}


def sample(operation: str, inputs: tuple[Any, ...], seed: int = 0) -> np.ndarray:
    """Rows in ascending order: all where the reference can hold them, the last among them."""
    where = AXES[operation]
    rows, most = inputs[0].shape[where.axis], ROWS
    if where is _ATTENTION:
        (B, _, N, _), S = inputs[0].shape, inputs[1].shape[1]
        most = max(1, SCORES // (B * N * S))
    if rows <= most:
        return np.arange(rows)
    drawn = np.random.default_rng(seed).choice(rows - 1, most - 1, replace=False)
    return np.sort(np.append(drawn, rows - 1))


def cut_inputs(operation: str, inputs: tuple[Any, ...], at: np.ndarray) -> tuple[Any, ...]:
    """The same call with these rows only."""
    where = AXES[operation]
    made = list(inputs)
    for i in where.inputs:
        made[i] = jnp.take(inputs[i], at, axis=where.axis)
    if where.sizes is not None:
        ends = np.cumsum(np.asarray(inputs[where.sizes]))
        group = np.searchsorted(ends, at, "right")  # past the last group: of none
        made[where.sizes] = jnp.asarray(np.bincount(group, minlength=len(ends))[: len(ends)],
                                        jnp.int32)  # fmt: skip
    return tuple(made)


def cut_results(operation: str, names: Any, results: Any, at: np.ndarray) -> list[Any]:
    """Of each result the sampled rows, or all of what has no rows."""
    where = AXES[operation]
    return [
        jnp.take(x, at, axis=where.axis) if name in where.results and x is not None else x
        for name, x in zip(names, results, strict=False)
    ]


def only(operation: str, cotangent: Any, at: np.ndarray) -> Any:
    """An output's cotangent, 0 outside the sampled rows."""
    axis = AXES[operation].axis
    shape = [1] * cotangent.ndim
    shape[axis] = cotangent.shape[axis]
    mask = np.zeros(cotangent.shape[axis], bool)
    mask[at] = True
    return jnp.where(mask.reshape(shape), cotangent, jnp.zeros_like(cotangent))
