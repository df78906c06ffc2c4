# SPDX-License-Identifier: Apache-2.0
"""Minibatches: the sequences of each update of a step, shuffled in every epoch, and packed if set.

Next: jaxmoe/rl/update.py scans over them.
"""

from dataclasses import replace

import jax
import numpy as np
from flax import struct

from jaxmoe.batches.batch import Batch, computed_tokens, map_rows
from jaxmoe.batches.microbatches import pack_sequences
from jaxmoe.batches.shared_prompts import PromptSharing, share_prompts
from jaxmoe.config import require
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.shapes import Leaf, Metrics


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
    lengths_B = (np.asarray(batch.segment_ids_BT) > 0).sum(axis=1)
    packing = pack_sequences(lengths_B, length=length, rows=tokens_per_microbatch // length)
    return replace(batch, packing=packing)


def split_minibatches(
    batch: Batch,
    a: Algorithm,
    *,
    seed: tuple[int, ...],
    tokens_per_microbatch: int = 0,
    sharing: PromptSharing | None = None,
) -> tuple[Batch, Minibatches | None]:
    """Return the batch, packed if asked, and the minibatches of its updates.

    Minibatches are None if the step has one update, on the whole batch. The order depends only on
    `seed`. With `sharing` the samples of a prompt share its tokens, where that saves enough.
    """
    packed = pack_batch(batch, tokens_per_microbatch)
    unpacked = replace(batch, packing=None)
    rows_UB = None if a.updates == 1 else _shuffle_rows(len(batch.tokens_BT), a, seed)
    parts = [
        map_rows(lambda x, rows=rows: x[rows], unpacked)
        for rows in ([] if rows_UB is None else rows_UB)
    ]
    packed_parts = [pack_batch(part, tokens_per_microbatch) for part in parts]
    if sharing is not None:
        shared, *shared_parts = (
            share_prompts(replace(part, packing=None), sharing, computed_tokens(part))
            for part in (packed, *packed_parts)
        )
        today, computed = (
            sum(computed_tokens(x) for x in (updates or [batch]))
            for batch, updates in ((packed, packed_parts), (shared, shared_parts))
        )
        if computed <= sharing.max_frac * today:
            packed, packed_parts = shared, shared_parts
    if rows_UB is None:
        return packed, None
    # The updates are a scan, so their packings must be stacked. Only the counts of microbatches
    # differ, and those are arrays.
    packing = jax.tree.map(lambda *x: np.stack(x), *(part.packing for part in packed_parts))
    return packed, Minibatches(rows_UB, packing)


def _shuffle_rows(rows: int, a: Algorithm, seed: tuple[int, ...]) -> np.ndarray:
    """The rows of each update [U, B], in another order in every epoch."""
    rng = np.random.default_rng(seed)
    require(
        rows % a.minibatches == 0,
        f"minibatches ({a.minibatches}) must divide the batch's {rows} rows. Try --set "
        "loss.minibatches=1.",
    )
    order = np.stack([rng.permutation(rows) for _ in range(a.epochs)])
    return order.reshape(a.updates, -1).astype(np.int32)


def sharing_metrics(batch: Batch, minibatches: Minibatches | None) -> Metrics:
    """Return computed tokens as a share of those without shared prompts: 1 if none are shared.

    With recorded experts it is also told how many prompts were computed again because an engine
    reported other experts for them.
    """
    packing = batch.packing if minibatches is None else minibatches.packing
    if packing is None or packing.shared is None:
        return {"batch/computed_tokens_frac": 1.0}
    computed = int(np.sum(packing.count)) * packing.rows * packing.length
    metrics = {"batch/computed_tokens_frac": computed / int(np.sum(packing.shared.unshared))}
    if batch.routed_experts_BTLA is not None:
        metrics["batch/unshared_prompts"] = int(batch.packing.shared.refused)
    return metrics
