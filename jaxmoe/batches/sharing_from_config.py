# SPDX-License-Identifier: Apache-2.0
"""Decide whether a run may share prompts, and the size of the rows that it then computes.

Next: shared_prompts.py; computed_tokens.py, which counts what is saved.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxmoe.batches.microbatches import Packing
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.config import Config, require
from jaxmoe.model.check_ops import function_name
from jaxmoe.model.moe.router import innermost_op, takes_parameter
from jaxmoe.parallel.attention import attention_impl
from pallas_kernels.sink_attention.api import shares_keys
from pallas_kernels.sink_attention.xla_invariant_blocks import KEYS

# With `auto` a batch is shared if this part of its tokens remains, or less. Longer rows cost time:
# with 0.90 of the tokens a step took 1.37 times the CPU-seconds, with 0.22 of them 0.32 times
# (benchmarks/shared_prompts.py).
MAX_FRAC = 0.75


def sharing_from_config(cfg: Config, attend: Callable[..., Any]) -> PromptSharing | None:
    """Return how the run's steps share prompts; None if they do not.

    `attend` is the attention of one device, `Ops.attend`. Raises ConfigError if
    `optim.share_prompts=on` cannot be had.
    """
    choice, samples = cfg.optim.share_prompts, cfg.rollout.samples_per_prompt
    if choice == "off":
        return None
    require(
        choice == "auto" or samples > 1,
        "optim.share_prompts=on needs several samples of a prompt, got rollout.samples_per_prompt=1"
        ". Try --set rollout.samples_per_prompt=8, or --set optim.share_prompts=auto.",
    )
    problem = find_sharing_problem(cfg, attend)
    require(
        choice == "auto" or problem is None,
        f"optim.share_prompts=on {problem}, or --set optim.share_prompts=auto.",
    )
    if problem is not None:
        return None
    sharing = row_sharing(cfg)
    if choice == "on":
        return sharing
    # Whatever the lengths, a step computes one microbatch or more.
    today = cfg.rollout.sequences_per_step * cfg.context
    computed = sharing.rows * sharing.length
    if not cfg.optim.tokens_per_microbatch and computed > MAX_FRAC * today:
        return None
    if samples == 1:
        return None
    return replace(sharing, max_frac=MAX_FRAC)


def row_sharing(cfg: Config) -> PromptSharing:
    """Return the rows and the unit of a config that shares every batch."""
    unit = KEYS if cfg.model.numerics == "invariant" else 1
    rows, length = shared_row_size(cfg, unit)
    has_contexts = cfg.rollout.max_episode_tokens > 0
    return PromptSharing(length, rows, unit, has_contexts=has_contexts)


def check_shared_unit(packing: Packing | None, attend: Callable[..., Any]) -> None:
    """Raise ConfigError if batch-invariant attention gets prompts that are not shared in its
    blocks: their log-probs would have other bits than those of separate rows."""
    shared = None if packing is None else packing.shared
    if shared is None or not is_invariant(attend):
        return
    require(
        shared.unit % KEYS == 0,
        f"batch-invariant attention needs prompts that are shared in blocks of {KEYS} tokens, got "
        f"PromptSharing(unit={shared.unit}). Try PromptSharing(unit={KEYS}).",
    )


def is_invariant(attend: Callable[..., Any]) -> bool:
    """Return True for a batch-invariant sink_attention, also inside an op of a mesh."""
    try:
        impl = attention_impl(innermost_op(attend))
    except ValueError:  # a function of the user
        return False
    return (impl if isinstance(impl, str) else impl[0]).endswith("_invariant")


def find_sharing_problem(cfg: Config, attend: Callable[..., Any]) -> str | None:
    """Return why this run cannot share prompts, with what to type; None if it can."""
    try:
        impl = attention_impl(attend)
    except ValueError:  # a function of the user
        if takes_parameter(attend, "k_last_segment_ids_BS"):
            return None
        return (
            "needs an attention that takes k_last_segment_ids_BS, and "
            f"{function_name(attend)} does not. Add the argument"
        )
    if shares_keys(impl):
        return None
    name = impl if isinstance(impl, str) else impl[0]
    return f"needs an attention that can share keys, got {name}. Try --set kernels=xla"


def shared_row_size(cfg: Config, unit: int) -> tuple[int, int]:
    """Return rows and tokens of a row of a microbatch with shared prompts.

    They depend on the config alone, so that all shared batches run one program. With
    `optim.tokens_per_microbatch` a row is what a microbatch holds on a device. Otherwise it holds a
    group of full length, and a microbatch the groups of today's. With mesh.sequence each device has
    as many tokens of a row.
    """
    optim, mesh, context = cfg.optim, cfg.mesh, cfg.context
    shards = mesh.row_shards
    if optim.tokens_per_microbatch:
        return shards, optim.tokens_per_microbatch // context // shards * context
    parts = max(optim.microbatches, cfg.loss.minibatches)
    sequences = max(1, cfg.rollout.sequences_per_step // parts // shards)
    groups, remainder = divmod(sequences, cfg.rollout.samples_per_prompt)
    shared = max(0, cfg.data.max_prompt_tokens - 1) // unit * unit
    branch = context - shared
    group = shared + cfg.rollout.samples_per_prompt * branch
    rows, length = groups * shards, group
    if remainder:  # a microbatch cuts a group
        rows, length = shards, groups * group + shared + remainder * branch
    # A zigzag gives each device two chunks of a row.
    multiple = mesh.sequence * (2 if mesh.sequence > 1 and mesh.attention == "zigzag" else 1)
    return rows, -(-length // multiple) * multiple
