# SPDX-License-Identifier: Apache-2.0
"""Compare sampled rows of a call of any size with the reference, computed piece by piece.

With cotangents that are 0 outside the sampled rows, every gradient equals the reference's gradient
over those rows alone; this includes gradients of inputs that all rows share (keys, matrices, the
head). One row is sampled from each stripe of rows, so that every tile of a kernel is checked: of
131,072 rows, one in 64 is compared. Next: one.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.measure import JittedOp
from pallas_kernels.bench.ops import Op, cast_float32

N_STRIPES = 2048  # stripes of rows, one sampled row each
MAX_SCORES = 2**26  # entries of the reference's largest array, approximately
MAX_SHARED = 2**28  # numbers of the shared inputs in a piece
CALL_COST = 2**22  # overhead of a call, in entries of the largest array


class Piece(NamedTuple):
    """Rows start … stop − 1 of the sample; they need entries of the shared inputs from `low` on."""

    start: int
    stop: int
    low: int


class SampleSplit(NamedTuple):
    """A sample split into pieces of equal shape, so that one program computes them all."""

    pieces: tuple[Piece, ...]
    rows: int  # of each piece, the last one padded
    entries: int  # of the shared inputs in each piece, where a row needs a part of them


def sample_stripes(n: int, max_count: int, seed: int = 0) -> np.ndarray:
    """One index of each of `max_count` stripes of n, and the last index; all if n is small."""
    if n <= max_count:
        return np.arange(n)
    edges = np.arange(max_count + 1) * n // max_count
    return np.append(np.random.default_rng(seed).integers(edges[:-2], edges[1:-1]), n - 1)


def sample_rows(op: Op, inputs: tuple[Any, ...], max_count: int = N_STRIPES) -> np.ndarray:
    """Sampled rows in ascending order: one of each stripe, and each group's first and last."""
    rows = inputs[0].shape[op.rows.axis]
    row_ids = sample_stripes(rows, max_count)
    if op.rows.sizes is not None:
        ends = np.cumsum(np.asarray(inputs[op.rows.sizes]))
        borders = np.concatenate([ends - 1, ends, [0]])
        row_ids = np.union1d(row_ids, borders[(borders >= 0) & (borders < rows)])
    return row_ids


def mask_cotangents(op: Op, cotangents: Any, row_ids: np.ndarray) -> Any:
    """Set an operation's cotangents to 0 outside the sampled rows."""
    axis = op.rows.axis

    def masked(x: Any) -> Any:
        mask = np.zeros([x.shape[axis] if i == axis else 1 for i in range(x.ndim)], bool)
        np.put(mask, row_ids, True)
        return jnp.where(mask, x, jnp.zeros_like(x))

    return jax.tree.map(masked, cotangents)


def select_compared(op: Op, results: Any, row_ids: np.ndarray) -> list[Any]:
    """Select the compared part of each result: sampled rows, or entries of a shared gradient."""
    return [
        None
        if x is None
        else _as_array(x).take(row_ids, op.rows.axis)
        if name in op.rows.results
        else _select_entries(op, name, _as_array(x))
        for name, x in zip(op.results, results, strict=False)
    ]


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _select_entries(op: Op, name: str, x: Any) -> Any:
    axis, max_count = op.rows.compared.get(name, (0, x.size))
    return (
        x
        if x.shape[axis : axis + 1] <= (max_count,)
        else x.take(sample_stripes(x.shape[axis], max_count), axis)
    )


def run_references(
    op: Op, case: Any, inputs: tuple[Any, ...], cotangents: Any, row_ids: np.ndarray
) -> tuple[list[Any], list[Any]]:
    """The compared part of the reference, in the inputs' dtype (naive) and in float32 (expected).

    `cotangents` are 0 outside the sampled rows, or None. Both lists have outputs, then gradients.
    """
    reference = JittedOp(op, case, "reference", is_timed=False)
    split = _split_sample(op, case, inputs, row_ids)
    naive, expected = _PieceSums(op, inputs), _PieceSums(op, inputs)
    for piece in split.pieces:
        piece_inputs, ct = (
            _piece_inputs(op, inputs, row_ids, split, piece),
            _piece_cotangents(op, cotangents, row_ids, split, piece),
        )
        naive.add(piece, _run_passes(reference, piece_inputs, ct))
        # Without this, TPUs and GPUs would round the operands of the reference's products.
        with jax.default_matmul_precision("highest"):
            expected.add(
                piece,
                _run_passes(
                    reference, cast_float32(piece_inputs), None if ct is None else cast_float32(ct)
                ),
            )
    return naive.results(), expected.results()


def _run_passes(side: JittedOp, inputs: tuple[Any, ...], cotangents: Any) -> list[Any]:
    ct = cotangents if cotangents is None else cotangents[0]
    return [x for run in side.passes(inputs, ct).values() for x in jax.tree.leaves(run())]


def _split_sample(op: Op, case: Any, inputs: tuple[Any, ...], row_ids: np.ndarray) -> SampleSplit:
    """Find the split with the least work that fits the reference; single rows if none fits."""
    layout, n = op.rows, len(row_ids)
    scores, n_entries, entry_size = layout.scores(inputs), 1, 0
    low, high = np.zeros(n, int), np.ones(n, int)
    if layout.spans is not None:
        low, high = layout.spans(case, inputs, row_ids)
        leaves = jax.tree.leaves([inputs[i] for i in layout.shared])
        n_entries = min(x.shape[layout.axis] for x in leaves)
        entry_size = sum(x.size for x in leaves) // n_entries
    best_split, min_work = None, np.inf
    for rows in (1 << i for i in range(n.bit_length() + 1)):
        starts = np.arange(0, n, rows)
        lows = np.minimum(np.minimum.reduceat(low, starts), n_entries - 1)
        entries = max(1, int((np.maximum.reduceat(high, starts) - lows).max()))
        work = len(starts) * (rows * entries * scores + CALL_COST)
        fits = rows * entries * scores <= MAX_SCORES and entries * entry_size <= MAX_SHARED
        if best_split is None or (fits and work < min_work):
            pieces = (
                Piece(i, min(i + rows, n), min(x, n_entries - entries))
                for i, x in zip(starts.tolist(), lows.tolist(), strict=True)
            )
            best_split, min_work = (
                SampleSplit(tuple(pieces), rows, entries),
                work if fits else np.inf,
            )
    assert best_split is not None
    return best_split


def _piece_inputs(
    op: Op, inputs: tuple[Any, ...], row_ids: np.ndarray, split: SampleSplit, piece: Piece
) -> tuple[Any, ...]:
    """The inputs of a call with the rows of this piece and the shared entries that they need."""
    layout, piece_inputs = op.rows, list(inputs)
    rows = _pad_rows(row_ids[piece.start : piece.stop], split.rows)
    for i in layout.inputs:
        piece_inputs[i] = inputs[i].take(rows, layout.axis)
    for i in layout.shared:
        piece_inputs[i] = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, piece.low, split.entries, layout.axis),
            inputs[i],
        )
    if layout.sizes is not None:
        ends = np.cumsum(np.asarray(inputs[layout.sizes]))
        owner = np.searchsorted(ends, row_ids[piece.start : piece.stop], "right")
        counts = np.bincount(owner, minlength=len(ends))[piece.low : piece.low + split.entries]
        piece_inputs[layout.sizes] = jnp.asarray(counts, jnp.int32)
    return tuple(piece_inputs)


def _pad_rows(rows: np.ndarray, n: int) -> np.ndarray:
    return np.append(rows, np.full(n - len(rows), rows[-1]))


def _piece_cotangents(
    op: Op, cotangents: Any, row_ids: np.ndarray, split: SampleSplit, piece: Piece
) -> Any:
    """The cotangents of a piece, in a tuple; None if there are none."""
    if cotangents is None:
        return None
    rows, count = _pad_rows(row_ids[piece.start : piece.stop], split.rows), piece.stop - piece.start
    piece_ct = jax.tree.map(lambda x: x.take(rows, op.rows.axis), cotangents)
    return (mask_cotangents(op, piece_ct, np.arange(count)),)


class _PieceSums:
    """Results of the pieces: concatenated for rows, summed for gradients that rows share."""

    def __init__(self, op: Op, inputs: tuple[Any, ...]) -> None:
        self.op, self.inputs = op, inputs
        self.parts: dict[str, Any] = {name: [] for name in op.rows.results}

    def add(self, piece: Piece, results: list[Any]) -> None:
        layout, count = self.op.rows, piece.stop - piece.start
        for name, x in zip(self.op.results, results, strict=True):
            if name in layout.results:
                self.parts[name].append(np.asarray(x.take(np.arange(count), layout.axis)))
                continue
            per_entry = name in layout.gradients
            if not per_entry or layout.compared.get(name, (None,))[0] != layout.axis:
                x = _select_entries(self.op, name, x)
            if name not in self.parts:
                shape = list(x.shape)
                if per_entry:
                    shape[layout.axis] = self._count_entries()
                self.parts[name] = x.dtype, jnp.zeros(shape, jnp.float32)
            dtype, total = self.parts[name]
            low = piece.low if per_entry else 0
            self.parts[name] = (
                dtype,
                _add_slice(total, x, low, axis=layout.axis if per_entry else 0),
            )

    def _count_entries(self) -> int:
        return jax.tree.leaves(self.inputs[self.op.rows.shared[0]])[0].shape[self.op.rows.axis]

    def results(self) -> list[Any]:
        layout, results = self.op.rows, []
        for name in (x for x in self.op.results if x in self.parts):
            part = self.parts[name]
            if name in layout.results:
                results.append(np.concatenate(part, layout.axis))
            else:
                total = part[1].astype(part[0])
                results.append(
                    _select_entries(self.op, name, total) if name in layout.gradients else total
                )
        return results


@partial(jax.jit, static_argnames="axis", donate_argnums=0)
def _add_slice(total: jax.Array, x: jax.Array, low: Any, *, axis: int) -> jax.Array:
    previous = jax.lax.dynamic_slice_in_dim(total, low, x.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, previous + x.astype(total.dtype), low, axis)
