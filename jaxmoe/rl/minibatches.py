# SPDX-License-Identifier: Apache-2.0
"""Minibatches: the sequences of each update of a step, shuffled in every epoch, and packed if set.

Next: jaxmoe/rl/update.py scans over them.
"""

from dataclasses import replace

import jax
import numpy as np
from flax import struct

from jaxmoe.config import require
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import Batch, map_rows
from jaxmoe.rl.microbatches import pack_sequences
from jaxmoe.shapes import Leaf


@struct.dataclass
class Minibatches:
    """The rows of each update; the first axis U is the update."""

    rows_UB: Leaf  # int32: rows of the batch
    packing: Leaf = None  # Packing of those rows, with a leading axis U


def pack_batch(batch: Batch, tokens_per_microbatch: int) -> Batch:
    """Pack the batch's sequences into rows of its own length; unchanged if the argument is 0."""
    if not tokens_per_microbatch:
        return batch
    length = batch.tokens_BT.shape[1]
    lengths_B = np.asarray(batch.segment_ids_BT).sum(axis=1)
    packing = pack_sequences(lengths_B, length=length, rows=tokens_per_microbatch // length)
    return replace(batch, packing=packing)


def split_minibatches(
    batch: Batch, a: Algorithm, *, seed: tuple[int, ...], tokens_per_microbatch: int = 0
) -> tuple[Batch, Minibatches | None]:
    """Return the batch, packed if asked, and the minibatches of its updates.

    Minibatches are None if the step has one update, on the whole batch. The order depends only on
    `seed`.
    """
    batch = pack_batch(batch, tokens_per_microbatch)
    if a.updates == 1:
        return batch, None
    rng = np.random.default_rng(seed)
    rows = len(batch.tokens_BT)
    require(
        rows % a.minibatches == 0,
        f"minibatches ({a.minibatches}) must divide the batch's {rows} rows. Try --set "
        "loss.minibatches=1.",
    )
    order = np.stack([rng.permutation(rows) for _ in range(a.epochs)])
    rows_UB = order.reshape(a.updates, -1).astype(np.int32)
    packing, unpacked = None, replace(batch, packing=None)
    if tokens_per_microbatch:
        parts = [
            pack_batch(map_rows(lambda x, rows=rows: x[rows], unpacked), tokens_per_microbatch)
            for rows in rows_UB
        ]
        # The updates are a scan, so their packings must be stacked. Only the counts of microbatches
        # differ, and those are arrays.
        packing = jax.tree.map(lambda *x: np.stack(x), *(part.packing for part in parts))
    return batch, Minibatches(rows_UB, packing)
