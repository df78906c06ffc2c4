# SPDX-License-Identifier: Apache-2.0
"""Contexts of an episode that begin as its prompt does: which tokens of a group are shared.

Each group of equal prompts stores one beginning. A later context shares all of it or nothing, so
its length is the one that saves most:

    saved(n) = n · (contexts of the group that begin with n tokens of the prompt − 1)

Next: jaxmoe/batches/shared_prompts.py.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.batches.batch import find_contexts
from jaxmoe.batches.microbatches import Packing


def measure_beginnings(
    segments_BT: np.ndarray,
    mask_BT: np.ndarray,
    inputs: Sequence[np.ndarray],
    limit_B: np.ndarray,
) -> list[list[int]]:
    """Return for each row the tokens of each context that are also the prompt's, at most limit_B.

    mask_BT: True at trained tokens. The token before the first one of a context, which has its
    log-prob, is not shared, nor is anything after it.
    inputs: arrays [B, T, …] of all that the model reads.
    """
    beginnings: list[list[int]] = [[] for _ in segments_BT]
    for b, start, end in find_contexts(segments_BT):
        trained = np.flatnonzero(mask_BT[b, start:end])
        prompt_tokens = int(trained[0]) if trained.size else end - start
        n = max(0, min(int(limit_B[b]), prompt_tokens - 1))
        equal_T = np.ones(n, bool)
        for x in inputs:
            equal = x[b, start : start + n] == x[b, :n]
            equal_T &= equal.all(axis=tuple(range(1, equal.ndim)))
        beginnings[b].append(n if equal_T.all() else int(equal_T.argmin()))
    return beginnings


def choose_shared(
    beginnings: Sequence[Sequence[int]], group_B: np.ndarray, unit: int
) -> np.ndarray:
    """Return int [B]: the shared tokens of each row's group, a multiple of `unit`."""
    shared_B = np.zeros(len(group_B), int)
    for group in range(group_B.max(initial=-1) + 1):
        members = np.flatnonzero(group_B == group).tolist()
        sizes = np.array([n // unit * unit for b in members for n in beginnings[b]], int)
        candidates = sorted({*sizes.tolist()}, reverse=True)
        saved = [n * (int((sizes >= n).sum()) - 1) for n in candidates]
        if candidates:
            shared_B[members] = candidates[int(np.argmax(saved))]
    return shared_B


def index_shared(
    segments_BT: np.ndarray, beginnings: Sequence[Sequence[int]], shared_B: np.ndarray
) -> tuple[np.ndarray, list[list[bool]]]:
    """Return int32 [B, T], the index of each token among the row's shared ones, −1 if it is not
    shared; and for each row True for each context that begins with them.
    """
    offset_BT = np.full(segments_BT.shape, -1, np.int32)
    contexts = [
        [n >= shared for n in sizes] for sizes, shared in zip(beginnings, shared_B, strict=True)
    ]
    begins = iter([x for row in contexts for x in row])
    for b, start, _ in find_contexts(segments_BT):
        if next(begins):
            n = int(shared_B[b])
            offset_BT[b, start : start + n] = np.arange(n)
    return offset_BT, contexts


def number_segments(
    packing: Packing, contexts: Sequence[Sequence[bool]], segments_BT: np.ndarray
) -> np.ndarray:
    """Return int32 [B, T]: the segment of each token that is not shared.

    Contexts that share are numbered from the row's branch segment on. The others come after the
    last segment that sees the group's shared tokens.
    """
    shared = packing.shared
    numbers_BC = np.zeros((len(contexts), max(map(len, contexts), default=1) or 1), np.int32)
    after_last: dict[int, int] = {}  # by the group's last segment that sees its shared tokens
    for i, begins in enumerate(contexts):
        branch, last = int(shared.branch_segment_B[i]), int(shared.last_segment_B[i])
        for c, is_sharing in enumerate(begins):
            if is_sharing:
                numbers_BC[i, c], branch = branch, branch + 1
            else:
                after_last[last] = after_last.get(last, last) + 1
                numbers_BC[i, c] = after_last[last]
    return np.take_along_axis(numbers_BC, np.maximum(segments_BT - 1, 0), axis=1)
