# SPDX-License-Identifier: Apache-2.0
"""The trained table of router remedies: each on each bed, over seeds, from shared warm starts.

A contender is compared with the bed's own loss seed by seed, each at the best of its rates.
Next: studies/router_bed.py trains one run.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmoe.shapes import Metrics
from jaxmoe.study.contenders import Comparison, Contender, run_study
from jaxmoe.study.results_store import ResultsStore
from studies.router_bed import (
    Bed,
    BedPrograms,
    bed_config,
    load_bed_weights,
    make_bed_programs,
    train_on_bed,
)

RATES = (2.5e-4, 5e-4, 1e-3)
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
    "soft → hard in 20 steps": ("router.route=route_annealed(steps=20)",),
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
    "soft → hard in 20 steps",
    "noise in rollouts + R3",
)


def bed_contenders(bed: Bed, rates: Sequence[float]) -> list[Contender]:
    """Return the contenders that make sense on a bed, the bed's own loss first."""
    disturbed = bed.engine_noise or bed.old_noise
    return [
        Contender(name, settings, tuple(rates))
        for name, settings in REMEDIES.items()
        if not (disturbed and name in _ROUTERS_WITHOUT_NOISE)
    ]


def run_bed(
    bed: Bed,
    folder: Path,
    *,
    seeds: int,
    steps: int,
    rates: Sequence[float] = RATES,
    report: Callable[[str], None] = print,
) -> list[Comparison]:
    """Compare all contenders on a bed; finished runs are in `folder` and are not repeated."""
    store = ResultsStore(folder / f"{bed.name}.json")
    load = functools.cache(functools.partial(load_bed_weights, folder=folder))

    # A contender's runs follow each other, so the programs of one are needed at a time.
    @functools.lru_cache(maxsize=1)
    def compile_programs(settings: tuple[str, ...]) -> BedPrograms:
        return make_bed_programs(bed, bed_config(steps, *bed.settings, *settings))

    def run(contender: Contender, rate: float | None, seed: int) -> Metrics:
        assert rate is not None
        metrics = train_on_bed(compile_programs(contender.settings), seed, load(seed), rate)
        n_finished = len(store) + 1
        report(
            f"{bed.name} {n_finished}/{n_runs}: {contender.name}, lr {rate}, seed {seed}: "
            f"{metrics['start']:.3f} -> {metrics['end']:.3f}"
        )
        return metrics

    contenders = bed_contenders(bed, rates)
    # Each rate is tried on a seed of its own; more if the best one is the lowest or the highest.
    n_runs = len(contenders) * (len(rates) + seeds)
    return run_study(
        contenders,
        run,
        name=f"{bed}; {steps} steps",
        store=store,
        seeds=seeds,
        measure="end",
    )
