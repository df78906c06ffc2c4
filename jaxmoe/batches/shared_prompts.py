# SPDX-License-Identifier: Apache-2.0
"""Shared prompts: the samples of a prompt are packed together, and its tokens are computed once.

GRPO samples several answers to a prompt, and without sharing the model computes the prompt for each
of them. How much is shared follows one rule, for fast and for batch-invariant numerics:

    shared tokens = (prompt tokens − 1) // unit · unit

Each sample has the rest of its prompt for itself, at least one token: the log-prob of its first
answer token comes from there. In episodes with several contexts fewer tokens may be shared, by more
contexts (jaxmoe/batches/shared_contexts.py).
Next: jaxmoe/batches/microbatches.py packs the tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.microbatches import Packing, SharedTokens
from jaxmoe.batches.shared_contexts import (
    choose_shared,
    index_shared,
    measure_beginnings,
    number_segments,
)
from jaxmoe.config import require


@dataclass(frozen=True)
class PromptSharing:
    """How prompts are shared: the rows of a microbatch, and when it pays."""

    length: int  # tokens of a row, at least one full sequence; a group longer than it is split
    rows: int = 1  # of a microbatch; a multiple of the devices that rows are sharded over
    unit: int = 1  # shared tokens are a multiple of it; for batch-invariant numerics their block
    max_frac: float = math.inf  # share a batch that then computes at most this part of the tokens
    has_contexts: bool = False  # rows may have several contexts

    def __post_init__(self) -> None:
        for name in ("length", "rows", "unit"):
            value = getattr(self, name)
            require(value >= 1, f"PromptSharing({name}=…) must be at least 1, got {value}.")

    @property
    def is_unconditional(self) -> bool:
        """True if every batch is shared."""
        return self.max_frac == math.inf


def share_prompts(batch: Batch, sharing: PromptSharing, unshared: int) -> Batch:
    """Return the batch packed with equal prompts stored once a row.

    Prompts are equal if their tokens, positions and recorded experts are. They are found by
    content, so minibatches of shuffled rows share what they still have in common.
    `unshared` is the number of tokens that the batch computes without sharing.
    Raises ValueError for a sequence that is longer than a row, and for rows with several contexts
    unless `sharing.has_contexts`.
    """
    segments_BT = np.asarray(batch.segment_ids_BT)
    n_contexts = int(segments_BT.max(initial=0))
    require(
        sharing.has_contexts or n_contexts <= 1,
        f"a row must have one context, got {n_contexts}. Try PromptSharing(…, has_contexts=True).",
    )
    lengths_B = (segments_BT > 0).sum(axis=1)
    prompts_B = prompt_lengths(batch)
    shared_B = np.maximum(prompts_B - 1, 0) // sharing.unit * sharing.unit
    tokens_BT, positions_BT = np.asarray(batch.tokens_BT), np.asarray(batch.positions_BT)
    experts = [
        np.asarray(x) for x in (batch.routed_experts_BTLA, batch.old_experts_BTLA) if x is not None
    ]
    by_tokens: list[object] = []
    by_experts: list[object] = []
    for i, (prompt, shared) in enumerate(zip(prompts_B, shared_B, strict=True)):
        # A row that shares nothing is a group of its own.
        inputs = (tokens_BT[i, :prompt].tobytes(), positions_BT[i, :prompt].tobytes())
        by_tokens.append(inputs if shared else i)
        by_experts.append((by_tokens[i], *(x[i, :shared].tobytes() for x in experts)))
    group_B = number_equal(by_experts)
    refused = len(set(by_experts)) - len(set(by_tokens))
    sizes: dict[str, Any] = dict(length=sharing.length, rows=sharing.rows)
    offset_BT = contexts = unshared_segment_BT = None
    if sharing.has_contexts:
        inputs = [tokens_BT, positions_BT, *experts]
        mask_BT = np.asarray(batch.loss_mask_BT)
        beginnings = measure_beginnings(segments_BT, mask_BT, inputs, shared_B)
        shared_B = choose_shared(beginnings, group_B, sharing.unit)
        offset_BT, contexts = index_shared(segments_BT, beginnings, shared_B)
        sizes |= {"unshared_B": lengths_B - (offset_BT >= 0).sum(axis=1), "contexts": contexts}
    packing = pack_groups(lengths_B, shared_B, group_B, **sizes)
    if contexts is not None:
        unshared_segment_BT = number_segments(packing, contexts, segments_BT)
    counts = {"unshared": np.int32(unshared), "refused": np.int32(refused)}
    shared_tokens = replace(
        packing.shared,
        unit=sharing.unit,
        offset_BT=offset_BT,
        unshared_segment_BT=unshared_segment_BT,
        **counts,
    )
    return replace(batch, packing=replace(packing, shared=shared_tokens))


def prompt_lengths(batch: Batch) -> np.ndarray:
    """Tokens before each row's first trained token; 0 for a row that trains nothing."""
    mask_BT = np.asarray(batch.loss_mask_BT)
    return np.where(mask_BT.any(axis=1), mask_BT.argmax(axis=1), 0)


def number_equal(keys: Sequence[object]) -> np.ndarray:
    """The index of each key's first occurrence among the different keys."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def pack_groups(
    lengths_B: np.ndarray,
    shared_B: np.ndarray,
    group_B: np.ndarray,
    *,
    length: int,
    rows: int,
    unshared_B: np.ndarray | None = None,
    contexts: Sequence[Sequence[bool]] | None = None,
) -> Packing:
    """Pack each group's shared tokens, then the rest of each of its sequences, side by side.

    unshared_B: the other tokens of each sequence; None: all but the first `shared_B`.
    contexts: of each sequence, True for those that begin with its shared tokens; None: one does.

    First-fit decreasing. A group that is longer than a row is cut into parts, each of which has the
    shared tokens. Raises ValueError for a sequence that is longer than a row.
    """
    too_long = np.flatnonzero(lengths_B > length)
    if too_long.size:
        i = too_long[0]
        raise ValueError(f"a row holds {length} tokens, sequence {i} has {lengths_B[i]}.")
    B, branch_B = len(lengths_B), lengths_B - shared_B if unshared_B is None else unshared_B
    sharing_B = np.array([sum(x) for x in contexts]) if contexts is not None else np.ones(B, int)
    unshared_contexts_B = np.array([len(x) for x in contexts or []] or sharing_B) - sharing_B
    parts = [
        part
        for group in range(group_B.max(initial=-1) + 1)
        for part in _cut_group(np.flatnonzero(group_B == group), shared_B, branch_B, length)
    ]
    sizes = [int(shared_B[part[0]] + branch_B[part].sum()) for part in parts]
    room: list[int] = []
    microbatch, start, shared_start, first, last, branch = (np.zeros(B, np.int32) for _ in range(6))
    is_stored, segment = np.zeros(B, bool), 1
    # A stable sort makes the packing of equal sizes depend on the batch alone.
    for i in np.argsort([-size for size in sizes], kind="stable"):
        row = next((r for r, free in enumerate(room) if free >= sizes[i]), len(room))
        if row == len(room):
            room.append(length)
        members = parts[i]
        offset = (row % rows) * length + length - room[row]
        shared = shared_B[members[0]]
        branches = branch_B[members]
        microbatch[members], shared_start[members] = row // rows, offset
        start[members] = offset + shared + np.cumsum(branches) - branches
        is_stored[members[0]] = True
        n_sharing = sharing_B[members]
        first[members], last[members] = segment, segment + n_sharing.sum()
        branch[members] = segment + 1 + np.cumsum(n_sharing) - n_sharing
        # The segments after the last that sees the shared tokens are for the other contexts.
        segment += int(n_sharing.sum() + unshared_contexts_B[members].sum()) + 1
        room[row] -= sizes[i]
    shared_tokens = SharedTokens(
        shared_B.astype(np.int32),
        shared_start,
        is_stored,
        first,
        last,
        branch,
        unshared=np.int32(0),
        refused=np.int32(0),
    )
    count = np.int32(-(-len(room) // rows))
    return Packing(microbatch, start, count, rows=rows, length=length, shared=shared_tokens)


def _cut_group(
    members: np.ndarray, shared_B: np.ndarray, branch_B: np.ndarray, length: int
) -> list[np.ndarray]:
    """The parts of a group that fit into a row together with the shared tokens."""
    parts: list[list[int]] = []
    free = -1
    for i in members:
        if branch_B[i] > free:
            parts.append([])
            free = length - int(shared_B[i])
        parts[-1].append(int(i))
        free -= int(branch_B[i])
    return [np.array(part) for part in parts]
