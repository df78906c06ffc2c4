# SPDX-License-Identifier: Apache-2.0
"""The turns of a batch as arrays, for advantages by turn, on the host.

Next: jaxmoe/losses/turns.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxmoe.batches.batch import TURN_ARRAYS, Batch
from jaxmoe.config import ConfigError, require
from jaxmoe.records import Rollout
from jaxmoe.rl.algorithm import Algorithm


def add_turns(batch: Batch, rollouts: Sequence[Rollout], a: Algorithm, max_turns: int) -> Batch:
    """Return the batch with the arrays of turns that the algorithm's advantages take.

    max_turns: size of J, which is the same in all steps, so that a step compiles once.
    Raises ConfigError if they take states, and the environment named none.
    """
    names = a.array_names.advantages
    if not {*TURN_ARRAYS} & {*names}:
        return batch
    ends_BJ = find_turn_ends(np.asarray(batch.loss_mask_BT), max_turns)
    batch = replace(batch, turn_ends_BJ=ends_BJ)
    if "state_ids_BJ" not in names:
        return batch
    keys = [r.state_keys for r in rollouts]
    ids_BJ = number_states(keys, batch.samples_per_prompt, max_turns)
    ids_BJ = np.where(ends_BJ >= 0, ids_BJ, -1).astype(np.int32)
    if (ends_BJ >= 0).any() and not (ids_BJ >= 0).any():
        raise ConfigError(
            "loss.advantages compares turns that began in the same state, and data.environment "
            'named no state in this step. Return info["state_key"] from reset and step, or try '
            "--set loss.advantages=turn_return_advantages."
        )
    return replace(batch, state_ids_BJ=ids_BJ)


def find_turn_ends(mask_BT: np.ndarray, max_turns: int | None = None) -> np.ndarray:
    """Return int32 [B, J]: the index of the last token of each turn, a run of True; −1 beyond.

    max_turns: J; None: the largest number of turns of a row. Raises ValueError for a row with more.
    """
    is_end_BT = mask_BT & ~np.pad(mask_BT[:, 1:], ((0, 0), (0, 1)))
    count_B = is_end_BT.sum(axis=1)
    max_count = int(count_B.max(initial=0))
    size = max(max_count, 1) if max_turns is None else max_turns
    if max_count > size:
        row = int(count_B.argmax())
        raise ValueError(f"a row may have {size} turns (max_turns), row {row} has {max_count}.")
    ends_BJ = np.full((len(mask_BT), size), -1, np.int32)
    row_N, time_N = np.nonzero(is_end_BT)
    first_N = np.repeat(np.cumsum(count_B) - count_B, count_B)
    ends_BJ[row_N, np.arange(len(row_N)) - first_N] = time_N
    return ends_BJ


def number_states(keys: Sequence[Sequence[str | None]], samples: int, max_turns: int) -> np.ndarray:
    """Return int32 [B, J]: numbers that are equal for equal keys of one prompt; −1 for None.

    keys: of the state before each turn of each row; `samples` neighbours have the same prompt.
    """
    ids_BJ = np.full((len(keys), max_turns), -1, np.int32)
    for start in range(0, len(keys), samples):
        numbers: dict[str, int] = {}
        for row in range(start, min(start + samples, len(keys))):
            for turn, key in enumerate(keys[row][:max_turns]):
                if key is not None:
                    ids_BJ[row, turn] = numbers.setdefault(key, len(numbers))
    return ids_BJ


def check_turns(batch: Batch) -> None:
    """Raise ConfigError unless the turns of a batch on the host are those of its mask."""
    ends_BJ, mask_BT = batch.turn_ends_BJ, batch.loss_mask_BT
    if ends_BJ is None:
        return
    rows = len(mask_BT)
    shapes = [np.shape(x) for x in (ends_BJ, batch.state_ids_BJ) if x is not None]
    require(
        all(len(shape) == 2 and shape[0] == rows for shape in shapes),
        f"batch.turn_ends_BJ and batch.state_ids_BJ must be [{rows}, J], got {shapes}. Try "
        "find_turn_ends(batch.loss_mask_BT).",
    )
    if not isinstance(ends_BJ, np.ndarray) or not isinstance(mask_BT, np.ndarray):
        return
    require(
        find_turn_ends(mask_BT).shape[1] <= ends_BJ.shape[1]
        and bool((find_turn_ends(mask_BT, ends_BJ.shape[1]) == ends_BJ).all()),
        "batch.turn_ends_BJ must have the last token of each run of batch.loss_mask_BT, and −1 "
        "after them. Try find_turn_ends(batch.loss_mask_BT).",
    )
