# SPDX-License-Identifier: Apache-2.0
"""Which sequences each update of a step trains on: shuffled anew every epoch, and packed if asked.

Next: jaxmoe/rl/update.py scans over them.
"""

from dataclasses import replace

import jax
import numpy as np
from flax import struct

from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.pieces import pack
from jaxmoe.shapes import Leaf


@struct.dataclass
class Minibatches:
    """One entry an update."""

    rows_UB: Leaf  # int32: rows of the batch
    packing: Leaf = None  # Packing of those rows, each leaf with an axis U before its own


def divide(
    batch: Batch, a: Algorithm, *, seed: tuple[int, ...], tokens_per_microbatch: int = 0
) -> tuple[Batch, Minibatches | None]:
    """The batch, packed if `tokens_per_microbatch` is above 0, and its updates' minibatches.

    The minibatches are None where there is one update, on the whole batch. The order depends on
    `seed` alone. Packed rows are as long as the batch's.
    """
    sequences, length = batch.tokens_BT.shape
    lengths_B = np.asarray(batch.segment_ids_BT).sum(axis=1)
    rows = tokens_per_microbatch // length

    if tokens_per_microbatch:
        batch = replace(batch, packing=pack(lengths_B, length=length, rows=rows))
    if a.updates == 1:
        return batch, None
    dice = np.random.default_rng(seed)
    order = np.stack([dice.permutation(sequences) for _ in range(a.epochs)])
    rows_UB = order.reshape(a.updates, -1).astype(np.int32)
    packing = None
    if tokens_per_microbatch:
        packings = [pack(lengths_B[part], length=length, rows=rows) for part in rows_UB]
        packing = jax.tree.map(lambda *x: np.stack(x), *packings)
    return batch, Minibatches(rows_UB, packing)
