# SPDX-License-Identifier: Apache-2.0
"""The trained study of attention sinks: with their gradient, without it, and without sinks.

A kernel that has a sink's forward and not its backward trains everything else; one that has neither
trains another model than the engine samples from. Next: studies/router_bed.py trains a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.model import Ops, make_ops
from jaxmoe.shapes import Params
from jaxmoe.study.contenders import Contender
from jaxmoe.study.tables import Column
from studies.bed import make_bed_step, open_bed_engine
from studies.bed_study import QUICK_WARM_STEPS, BedStudy
from studies.router_bed import TASK, Bed, BedPrograms, bed_config, load_bed_weights, train_on_bed

RATES = (2e-3, 4e-3)
NO_SINK = -1e9  # a logit whose exponential is 0
# Shared prompts need the op as it is.
SETTINGS = ("loss.minibatches=1", "loss.old_logp=detached", "optim.share_prompts=off")


@dataclass(frozen=True)
class SinkBed(Bed):
    """A start whose sinks are those of the warm start, plus `shift`."""

    shift: float = 0.0


SINK_BEDS = {
    bed.name: bed
    for bed in (
        SinkBed("learned_sinks", SETTINGS),
        # Sinks that RL has to change.
        SinkBed("shifted_sinks", SETTINGS, shift=3.0),
    )
}


def attend_with_constant_sinks(
    attend: Callable[..., Any], q: Any, k: Any, v: Any, sinks: Any, **named: Any
) -> Any:
    """Attention whose sinks get no gradient."""
    return attend(q, k, v, jax.lax.stop_gradient(sinks), **named)


def attend_without_sinks(
    attend: Callable[..., Any], q: Any, k: Any, v: Any, sinks: Any, **named: Any
) -> Any:
    """Attention over the keys alone."""
    return attend(q, k, v, jnp.full_like(sinks, NO_SINK), **named)


# The trainer's attention, by contender; the engine always has sinks.
WAYS: dict[str, Callable[..., Any] | None] = {
    "all gradients": None,
    "sinks without a gradient": attend_with_constant_sinks,
    "a trainer without sinks": attend_without_sinks,
}


def load_sink_weights(bed: SinkBed, seed: int, folder: Path, quick: bool) -> Params:
    """Return the router study's warm start of a seed, with the bed's shift of all sinks."""
    params = (
        load_bed_weights(0, folder, steps=QUICK_WARM_STEPS)
        if quick
        else load_bed_weights(seed, folder)
    )

    def shift(path: Any, leaf: Any) -> Any:
        is_sink = "sinks" in jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf + jnp.float32(bed.shift) if is_sink else leaf

    return jax.tree_util.tree_map_with_path(shift, params)


def make_sink_programs(bed: SinkBed, steps: int, settings: tuple[str, ...]) -> BedPrograms:
    """Return the programs of a contender; `settings` has its name in WAYS."""
    cfg = bed_config(steps, *bed.settings)
    ops, (name,) = make_ops(cfg), settings
    step = make_bed_step(cfg, TASK, sink_ops(ops, WAYS[name]), ops)
    return BedPrograms(bed, step, open_bed_engine(cfg, ops))


def sink_ops(ops: Ops, attend: Callable[..., Any] | None) -> Ops:
    """Return ops whose attention is this one over theirs; the same ops for None."""
    return ops if attend is None else replace(ops, attend=partial(attend, ops.attend))


SINKS = BedStudy(
    "sinks",
    "attention sinks with their gradient, without it, and a trainer without sinks",
    SINK_BEDS,
    lambda bed: [Contender(name, (name,), RATES) for name in WAYS],
    load_sink_weights,
    make_sink_programs,
    train_on_bed,
    seeds=8,
    steps=20,
    run_seconds=1.3,
    quick_bed="shifted_sinks",
    columns={"grad_norm_p99": Column("gradient norm, p99", "{:.3g}")},
)
