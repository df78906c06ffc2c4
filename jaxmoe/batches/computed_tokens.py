# SPDX-License-Identifier: Apache-2.0
"""Tokens that a step computes of sequences of full length, with shared prompts and without.

Next: jaxmoe/run/dry_run.py prints them, jaxmoe/plan/roofline.py bounds their time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.batches.shared_prompts import PromptSharing, pack_groups
from jaxmoe.batches.sharing_from_config import (
    MAX_FRAC,
    find_sharing_problem,
    row_sharing,
    sharing_from_config,
)
from jaxmoe.config import Config
from pallas_kernels import sink_attention


@dataclass(frozen=True)
class ComputedTokens:
    """Tokens of one pass over a batch, in one update or several."""

    tokens: int  # padding included
    unshared: int  # the tokens if each sample computes its prompt
    microbatches: int  # of an update, the most
    prompts: int = 0  # times that a prompt's shared tokens are computed; 0: none are shared
    shared: int = 0  # the shared tokens of a prompt

    @property
    def frac(self) -> float:
        """The part of the unshared tokens."""
        return self.tokens / self.unshared


class FullLengths(NamedTuple):
    """Tokens of the passes of a step whose sequences have full length."""

    batch: ComputedTokens  # in a pass that scores
    updates: ComputedTokens  # in the updates of an epoch


def count_full_lengths(cfg: Config, sharing: PromptSharing | None) -> FullLengths:
    """Return what a step computes at full lengths, by the rule of `split_minibatches`.

    With G samples of a prompt of P tokens and answers of A, of which P − 1 are shared, a row of a
    group computes (P − 1 + G·(A + 1)) / (G·(P + A)) of the tokens. Of minibatches it is an estimate
    for one shuffle.
    """
    n = cfg.loss.minibatches
    if sharing is not None:
        computed = FullLengths(_count_pass(cfg, 1, sharing), _count_pass(cfg, n, sharing))
        if computed.updates.frac <= sharing.max_frac:
            return computed
    return FullLengths(_count_pass(cfg, 1, None), _count_pass(cfg, n, None))


def shared_at_full_lengths(cfg: Config, attend: Callable[..., Any]) -> PromptSharing | None:
    """Return how a batch of full lengths shares prompts; None if it does not."""
    sharing = sharing_from_config(cfg, attend)
    return sharing if count_full_lengths(cfg, sharing).updates.prompts else None


def _count_pass(cfg: Config, minibatches: int, sharing: PromptSharing | None) -> ComputedTokens:
    rollout, context = cfg.rollout, cfg.context
    sequences = rollout.sequences_per_step
    rows, packed_rows = sequences // minibatches, cfg.optim.tokens_per_microbatch // context
    microbatches, rows_read = max(1, cfg.optim.microbatches // minibatches), rows
    if packed_rows:
        microbatches = -(-rows // packed_rows)
        rows_read = microbatches * packed_rows
    unshared = minibatches * rows_read * context
    if sharing is None:
        return ComputedTokens(unshared, unshared, microbatches)
    shared = max(0, cfg.data.max_prompt_tokens - 1) // sharing.unit * sharing.unit
    group_B = np.arange(sequences) // rollout.samples_per_prompt
    if minibatches > 1:
        group_B = np.random.default_rng(0).permutation(group_B)
    packings = [
        pack_groups(
            np.full(rows, context),
            np.full(rows, shared),
            part,
            length=sharing.length,
            rows=sharing.rows,
        )
        for part in group_B.reshape(minibatches, rows)
    ]
    counts = [int(packing.count) for packing in packings]
    return ComputedTokens(
        sum(counts) * sharing.rows * sharing.length,
        unshared,
        max(counts),
        sum(int(packing.shared.is_stored_B.sum()) for packing in packings),
        shared,
    )


def describe_sharing(cfg: Config, attend: Callable[..., Any]) -> str:
    """Return the line of a dry run: what is shared, and the tokens of a pass over the batch.

    "" with one sample of each prompt. Raises ConfigError as `sharing_from_config` does.
    """
    sharing, rollout = sharing_from_config(cfg, attend), cfg.rollout
    if rollout.samples_per_prompt == 1:
        return ""
    computed = count_full_lengths(cfg, sharing).updates
    tokens = f"{computed.tokens:,}"
    if computed.prompts:
        times = computed.prompts / rollout.prompts_per_step
        repeats = "once" if times == 1 else f"{times:.3g} times"
        text = (
            f"  prompts      computed {repeats} for their {rollout.samples_per_prompt} samples: "
            f"{tokens} of {computed.unshared:,} tokens ({computed.frac:.2f}) in a pass over a "
            "batch of full lengths"
        )
        # A kernel that is not named is chosen when the run begins.
        is_chosen_later = attend is sink_attention
        condition = ", where attention runs in XLA or by mosaic_gpu or mosaic_tpu"
        return text + (condition if is_chosen_later else "")
    if cfg.optim.share_prompts == "off":
        reason = "optim.share_prompts=off"
    elif problem := find_sharing_problem(cfg, attend):
        reason = f"sharing them {problem}"
    else:
        frac = count_full_lengths(cfg, row_sharing(cfg)).updates.frac
        reason = (
            f"sharing them would leave {frac:.2f} of these, and optim.share_prompts=auto shares "
            f"where at most {MAX_FRAC} is left"
        )
    return (
        f"  prompts      computed for each of their {rollout.samples_per_prompt} samples: {tokens} "
        f"tokens in a pass over a batch of full lengths; {reason}"
    )
