# SPDX-License-Identifier: Apache-2.0
"""The trained study of router remedies: each on each bed, over seeds, from shared warm starts.

Next: studies/router_bed.py trains one run.
"""

from functools import partial
from pathlib import Path

from jaxmoe.shapes import Params
from jaxmoe.study.contenders import Contender
from jaxmoe.study.tables import Column
from studies.bed_study import QUICK_WARM_STEPS, BedStudy
from studies.router_bed import (
    BEDS,
    Bed,
    BedPrograms,
    bed_config,
    load_bed_weights,
    make_bed_programs,
    train_on_bed,
)
from studies.router_costs import measure_costs

RATES = (2e-3, 4e-3)
_DETACHED = ("loss.minibatches=1", "loss.old_logp=detached")
_R3 = ("router.replay=R3", "rollout.compare_experts=False")
_LOGITS = "router.record=record_router_logits"
REMEDIES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "detached old log-probs": _DETACHED,
    "dual clip 3": ("loss.objective=ppo_clip(dual_clip=3.0)",),
    "GSPO": ("loss.objective=gspo", "loss.aggregation=seq_mean_token_mean"),
    "CISPO": ("loss.objective=cispo",),
    "token IS": ("loss.old_logp=recomputed", "loss.rollout_correction=token_is(high=2.0)"),
    "sequence IS": ("loss.old_logp=recomputed", "loss.rollout_correction=sequence_is(high=2.0)"),
    "IcePop": ("loss.old_logp=recomputed", "loss.rollout_correction=token_icepop"),
    "R2": ("router.replay=R2",),
    "R3": _R3,
    "mask switched tokens": (
        "loss.rollout_correction=mask_switched",
        "rollout.compare_experts=True",
    ),
    "RSPO": ("loss.objective=rspo", _LOGITS),
    "ERPO": ("loss.objective=erpo",),
    "switch-aware clip": ("loss.objective=switch_aware_clip(tight=0.75)",),
    "clip scaled by 1/T²": ("loss.objective=length_scaled_clip(length=16)",),
    "router KL 0.1": ("router.terms=router_kl(0.1)",),
    "router entropy 0.01": ("router.terms=router_entropy(0.01)",),
    "load balance 0.01": ("router.terms=load_balance(0.01)",),
    "z-loss 1e-3": ("router.terms=z_loss(1e-3)",),
    "frozen router": ("router.freeze=True",),
    "router lr × 0.1": ("router.lr_scale=0.1",),
    "straight-through": ("router.route=route_straight_through",),
    "soft": ("router.route=route_softly",),
    "soft → hard in 10 steps": ("router.route=route_annealed(steps=10)",),
    "noise in rollouts + R3": ("router.noise=normal(0.3)", *_R3),
    "detached + R3": (*_DETACHED, *_R3),
    "detached + token IS": (*_DETACHED, "loss.rollout_correction=token_is(high=2.0)"),
    "detached + sequence IS": (*_DETACHED, "loss.rollout_correction=sequence_is(high=2.0)"),
    "R2 + dual clip 3": ("router.replay=R2", "loss.objective=ppo_clip(dual_clip=3.0)"),
    "R3 + frozen router": ("router.freeze=True", *_R3),
}
# The noise of a bed is that of top-k routers, so other routers do not meet it.
_ROUTERS_WITHOUT_NOISE = (
    "straight-through",
    "soft",
    "soft → hard in 10 steps",
    "noise in rollouts + R3",
)


def list_bed_contenders(bed: Bed) -> list[Contender]:
    """Return the contenders that make sense on a bed, the bed's own loss first."""
    disturbed = bed.engine_noise or bed.old_noise
    return [
        Contender(name, settings, RATES)
        for name, settings in REMEDIES.items()
        if name in (bed.contenders or REMEDIES)
        and not (disturbed and name in _ROUTERS_WITHOUT_NOISE)
    ]


def load_router_weights(bed: Bed, seed: int, folder: Path, quick: bool) -> Params:
    """Return the warm start of a seed, which all beds share; one for all in a quick study."""
    if quick:
        return load_bed_weights(0, folder, steps=QUICK_WARM_STEPS)
    return load_bed_weights(seed, folder)


def make_router_programs(bed: Bed, steps: int, settings: tuple[str, ...]) -> BedPrograms:
    """Return the programs of a contender."""
    return make_bed_programs(bed, bed_config(steps, *bed.settings, *settings))


ROUTER = BedStudy(
    "router",
    "every router remedy trained over seeds on disturbed beds, and its cost of a step",
    BEDS,
    list_bed_contenders,
    load_router_weights,
    make_router_programs,
    train_on_bed,
    seeds=8,
    steps=20,
    run_seconds=1.0,
    quick_bed="two_forwards",
    columns={
        "grad_norm_p99": Column("gradient norm, p99", "{:.3g}"),
        "ratio_max": Column("largest ratio", "{:.3g}", max),
    },
    measure_costs=partial(measure_costs, REMEDIES),
)
