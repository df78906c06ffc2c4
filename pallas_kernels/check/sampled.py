# SPDX-License-Identifier: Apache-2.0
"""Some rows of a call of any size, and what the reference says of them, a piece at a time.

With cotangents that are 0 outside the sampled rows every gradient is the reference's over those
rows alone, gradients of what all rows share (keys, matrices, the head) included. Each stripe of
rows gives one, so that no tile of a kernel goes unseen: 131,072 rows are looked at in one of 64.
Next: one.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.measure import Ours
from pallas_kernels.bench.ops import Op, float32

ROWS = 2048  # stripes
SCORES = 2**26  # entries of the reference's largest array, about
SHARED = 2**28  # numbers of the shared inputs that a piece takes
CALL = 2**22  # what a call costs beside its work, in entries of that array


class Piece(NamedTuple):
    """Rows of the sample, and where what they need of the shared inputs begins."""

    start: int
    stop: int
    low: int


class Cut(NamedTuple):
    """A sample in pieces that are alike: one program computes them all."""

    pieces: tuple[Piece, ...]
    rows: int  # of a piece, the last ones filled up
    entries: int  # of the shared inputs that it takes, where a row needs a part of them


def stripes(n: int, most: int, seed: int = 0) -> np.ndarray:
    """One of each of `most` stripes of n, the last of all among them; all where there are few."""
    if n <= most:
        return np.arange(n)
    edges = np.arange(most + 1) * n // most
    return np.append(np.random.default_rng(seed).integers(edges[:-2], edges[1:-1]), n - 1)


def sample(op: Op, inputs: tuple[Any, ...], most: int = ROWS) -> np.ndarray:
    """Rows in ascending order: one of each stripe, and the first and the last of each group."""
    rows = inputs[0].shape[op.rows.axis]
    at = stripes(rows, most)
    if op.rows.sizes is not None:
        ends = np.cumsum(np.asarray(inputs[op.rows.sizes]))
        borders = np.concatenate([ends - 1, ends, [0]])
        at = np.union1d(at, borders[(borders >= 0) & (borders < rows)])
    return at


def only(op: Op, cotangents: Any, at: np.ndarray) -> Any:
    """An operation's cotangents, 0 outside the sampled rows."""
    axis = op.rows.axis

    def masked(x: Any) -> Any:
        mask = np.zeros([x.shape[axis] if i == axis else 1 for i in range(x.ndim)], bool)
        np.put(mask, at, True)
        return jnp.where(mask, x, jnp.zeros_like(x))

    return jax.tree.map(masked, cotangents)


def looked_at(op: Op, results: Any, at: np.ndarray) -> list[Any]:
    """Of each result what is compared: the sampled rows, of what rows share some or all of it."""
    return [
        None if x is None
        else _array(x).take(at, op.rows.axis) if name in op.rows.results
        else _look(op, name, _array(x))
        for name, x in zip(op.results, results, strict=False)
    ]  # fmt: skip


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _look(op: Op, name: str, x: Any) -> Any:
    axis, most = op.rows.looked_at.get(name, (0, x.size))
    return x if x.shape[axis : axis + 1] <= (most,) else x.take(stripes(x.shape[axis], most), axis)


def references(
    op: Op, case: Any, inputs: tuple[Any, ...], cotangents: Any, at: np.ndarray
) -> tuple[list[Any], list[Any]]:
    """What is compared of the reference in the dtype of the inputs, and in float32 (what is right).

    `cotangents` are 0 outside the sampled rows, or None. Outputs, then gradients.
    """
    reference, cut = Ours(op, case, "reference"), _cut(op, case, inputs, at)
    plain, right = _Sums(op, inputs), _Sums(op, inputs)
    for piece in cut.pieces:
        few, ct = _inputs(op, inputs, at, cut, piece), _cotangents(op, cotangents, at, cut, piece)
        plain.add(piece, _run(reference, few, ct))
        # Partial results in float32: TPUs and GPUs would else round the reference's own products.
        with jax.default_matmul_precision("highest"):
            right.add(piece, _run(reference, float32(few), None if ct is None else float32(ct)))
    return plain.found(), right.found()


def _run(side: Ours, inputs: tuple[Any, ...], cotangents: Any) -> list[Any]:
    ct = cotangents if cotangents is None else cotangents[0]
    return [x for run in side.passes(inputs, ct).values() for x in jax.tree.leaves(run())]


def _cut(op: Op, case: Any, inputs: tuple[Any, ...], at: np.ndarray) -> Cut:
    """Those of the least work that the reference can hold; in single rows where it holds none."""
    here, n = op.rows, len(at)
    scores, of, each = here.scores(inputs), 1, 0
    low, high = np.zeros(n, int), np.ones(n, int)
    if here.spans is not None:
        low, high = here.spans(case, inputs, at)
        leaves = jax.tree.leaves([inputs[i] for i in here.shared])
        of = min(x.shape[here.axis] for x in leaves)
        each = sum(x.size for x in leaves) // of
    best, least = None, np.inf
    for rows in (1 << i for i in range(n.bit_length() + 1)):
        starts = np.arange(0, n, rows)
        lows = np.minimum(np.minimum.reduceat(low, starts), of - 1)
        entries = max(1, int((np.maximum.reduceat(high, starts) - lows).max()))
        work = len(starts) * (rows * entries * scores + CALL)
        fits = rows * entries * scores <= SCORES and entries * each <= SHARED
        if best is None or (fits and work < least):
            pieces = (Piece(i, min(i + rows, n), min(x, of - entries))
                      for i, x in zip(starts.tolist(), lows.tolist(), strict=True))  # fmt: skip
            best, least = Cut(tuple(pieces), rows, entries), work if fits else np.inf
    assert best is not None
    return best


def _inputs(
    op: Op, inputs: tuple[Any, ...], at: np.ndarray, cut: Cut, piece: Piece
) -> tuple[Any, ...]:
    """The same call with these rows only, and with what they need."""
    here, made = op.rows, list(inputs)
    rows = _filled(at[piece.start : piece.stop], cut.rows)
    for i in here.inputs:
        made[i] = inputs[i].take(rows, here.axis)
    for i in here.shared:
        made[i] = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, piece.low, cut.entries, here.axis), inputs[i]
        )
    if here.sizes is not None:
        ends = np.cumsum(np.asarray(inputs[here.sizes]))
        owner = np.searchsorted(ends, at[piece.start : piece.stop], "right")
        counts = np.bincount(owner, minlength=len(ends))[piece.low : piece.low + cut.entries]
        made[here.sizes] = jnp.asarray(counts, jnp.int32)
    return tuple(made)


def _filled(rows: np.ndarray, n: int) -> np.ndarray:
    return np.append(rows, np.full(n - len(rows), rows[-1]))


def _cotangents(op: Op, cotangents: Any, at: np.ndarray, cut: Cut, piece: Piece) -> Any:
    """One in a tuple, for the rows of a piece; None where there are none."""
    if cotangents is None:
        return None
    rows, count = _filled(at[piece.start : piece.stop], cut.rows), piece.stop - piece.start
    taken = jax.tree.map(lambda x: x.take(rows, op.rows.axis), cotangents)
    return (only(op, taken, np.arange(count)),)


class _Sums:
    """The results of the pieces side by side, or added up where rows share them."""

    def __init__(self, op: Op, inputs: tuple[Any, ...]) -> None:
        self.op, self.inputs = op, inputs
        self.parts: dict[str, Any] = {name: [] for name in op.rows.results}

    def add(self, piece: Piece, results: list[Any]) -> None:
        here, count = self.op.rows, piece.stop - piece.start
        for name, x in zip(self.op.results, results, strict=True):
            if name in here.results:
                self.parts[name].append(np.asarray(x.take(np.arange(count), here.axis)))
                continue
            apart = name in here.gradients
            if not apart or here.looked_at.get(name, (None,))[0] != here.axis:
                x = _look(self.op, name, x)
            if name not in self.parts:
                shape = list(x.shape)
                if apart:
                    shape[here.axis] = self._entries()
                self.parts[name] = x.dtype, jnp.zeros(shape, jnp.float32)
            dtype, total = self.parts[name]
            low = piece.low if apart else 0
            self.parts[name] = dtype, _added(total, x, low, axis=here.axis if apart else 0)

    def _entries(self) -> int:
        return jax.tree.leaves(self.inputs[self.op.rows.shared[0]])[0].shape[self.op.rows.axis]

    def found(self) -> list[Any]:
        here, made = self.op.rows, []
        for name in (x for x in self.op.results if x in self.parts):
            part = self.parts[name]
            if name in here.results:
                made.append(np.concatenate(part, here.axis))
            else:
                whole = part[1].astype(part[0])
                made.append(_look(self.op, name, whole) if name in here.gradients else whole)
        return made


@partial(jax.jit, static_argnames="axis", donate_argnums=0)
def _added(total: jax.Array, x: jax.Array, low: Any, *, axis: int) -> jax.Array:
    here = jax.lax.dynamic_slice_in_dim(total, low, x.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, here + x.astype(total.dtype), low, axis)
