# SPDX-License-Identifier: Apache-2.0
"""Make the Algorithm of a config.

Next: jaxmoe/rl/algorithm.py.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from jaxmoe.config import Config, RouterConfig, require
from jaxmoe.config.function_specs import (
    bind_function,
    parse_call,
    parse_function,
    parse_functions,
    split_calls,
)
from jaxmoe.losses import load_balance, router_entropy, router_kl, z_loss
from jaxmoe.model.check_ops import function_name
from jaxmoe.model.moe.routers_from_config import record_from_config
from jaxmoe.rl.algorithm import ARRAYS, CHOICES, LOSSES, Algorithm, list_functions
from jaxmoe.rl.distillation import teacher_terms
from jaxmoe.rl.presets import apply_preset
from jaxmoe.rl.scorer import find_recorded_sizes
from jaxmoe.rl.terms import Function, Term, entropy_term, kl_term, missing_array, value_term
from jaxmoe.rl.validate import check_algorithm, check_old_arrays, check_staleness

ROUTER_TERMS = {fn.__name__: fn for fn in (load_balance, z_loss, router_kl, router_entropy)}


def algorithm_from_config(cfg: Config) -> Algorithm:
    """Return the algorithm of a config, after a trial on abstract arrays.

    Raises ConfigError for an algorithm that cannot run: unknown names or options, arrays that are
    not available, groups that are too small, two corrections of the same mismatch.
    """
    loss, m = apply_preset(cfg.loss), cfg.model
    record = record_from_config(cfg.router, m.experts_per_token)
    recorded = find_recorded_sizes(record, m)
    arrays = {kind: (*names, *recorded) for kind, names in ARRAYS.items() if kind != "kl"}
    functions = {
        name: parse_function(
            getattr(loss, name), f"loss.{name}", arrays[name], LOSSES, CHOICES[name]
        )
        for name in ("objective", "advantages", "aggregation")
    }
    kl = parse_function(loss.kl, "loss.kl", ARRAYS["kl"], LOSSES, CHOICES["kl"])
    terms, reward_kl = [], None
    if loss.entropy_coef:
        terms.append(entropy_term(loss.entropy_coef))
    if loss.kl_coef and loss.kl_in == "loss":
        terms.append(kl_term(loss.kl_coef, kl))
    elif loss.kl_coef:
        reward_kl = kl_term(loss.kl_coef, kl)
        # The KL acts through the reward. The term of weight 0 only reports it as a metric.
        terms.append(replace(reward_kl, weight=0.0))
    if cfg.critic.backbone != "none":
        terms.append(value_term(cfg.critic.loss_coef, cfg.critic.clip))
    terms += router_terms_from_config(cfg.router)
    terms += teacher_terms(cfg.distill)
    algorithm = Algorithm(
        **functions,
        rollout_correction=parse_functions(
            loss.rollout_correction,
            "loss.rollout_correction",
            arrays["rollout_correction"],
            LOSSES,
            CHOICES["rollout_correction"],
        ),
        old_logp=loss.old_logp,
        epochs=loss.epochs,
        minibatches=loss.minibatches,
        terms=(*terms, *parse_terms(loss.terms, recorded)),
        reward_kl=reward_kl,
        critic=cfg.critic.backbone,
        reward_coef=cfg.distill.reward_coef,
        teacher_coef=cfg.distill.advantage_coef,
        anneal_steps=cfg.distill.anneal_steps,
    )
    available = {"ref_logp_BT": loss.kl_coef > 0, "teacher_logp_BT": bool(cfg.distill.teacher)}
    available |= dict.fromkeys(
        ("teacher_reverse_kl_BT", "teacher_forward_kl_BT"),
        bool(cfg.distill.teacher) and (not cfg.distill.is_url or cfg.distill.top_k > 0),
    )
    available |= dict.fromkeys(
        ("routed_experts_BTLA", "load_LE", "switched_BT"), cfg.records_experts
    )
    available |= {"turn_ends_BJ": cfg.rollout.max_turns > 1}
    available |= {"state_ids_BJ": bool(cfg.data.environment.strip())}
    available |= dict.fromkeys(
        ("router_logits_BTLE", "old_router_logits_BTLE"), "router_logits_BTLE" in recorded
    )
    for key, fn, names in list_functions(algorithm):
        for name in names:
            if not available.get(name, True):
                raise missing_array(key, fn, name, arrays[key.removeprefix("loss.")])
            _check_switches_exist(fn, name, cfg.router.replay)
    routing = (m.n_layers, m.n_experts, m.experts_per_token)
    check_algorithm(algorithm, cfg.rollout.samples_per_prompt, recorded, routing)
    check_old_arrays(algorithm)
    _check_teacher_acts(cfg, algorithm)
    check_staleness(algorithm, cfg.rollout.max_staleness)
    return algorithm


def _check_switches_exist(fn: Function, name: str, replay: str) -> None:
    """Raise ConfigError for a function of switches between forwards that use the same experts."""
    same_experts = {"R3": ("switched_BT", "old_switched_BT"), "R2": ("old_switched_BT",)}
    require(
        name not in same_experts.get(replay, ()),
        f"loss: {function_name(fn)} acts where experts switch, and with router.replay={replay} "
        "none do: both forwards use the same. Try --set router.replay='', or another function.",
    )


def _check_teacher_acts(cfg: Config, a: Algorithm) -> None:
    """Raise ConfigError for a teacher whose arrays no part of the loss takes."""
    names = {*a.array_names.objective, *a.array_names.advantages}
    names = names.union(*(term.array_names for term in a.terms if term.weight))
    require(
        not cfg.distill.teacher
        or cfg.distill.warmup_share > 0
        or a.teacher_coef > 0
        or any("teacher_" in name for name in names),
        f"distill.teacher={cfg.distill.teacher} needs a weight in the loss, got "
        "distill.advantage_coef=0.0, distill.reverse_kl_coef=0.0 and distill.forward_kl_coef=0.0. "
        "Try --set distill.advantage_coef=1.0, or --set distill.teacher=.",
    )
    require(
        cfg.distill.top_k == 0 or a.needs_divergences,
        f"distill.top_k ({cfg.distill.top_k}) needs a divergence in the loss, got "
        "distill.reverse_kl_coef=0.0 and distill.forward_kl_coef=0.0. Try --set "
        "distill.reverse_kl_coef=0.1, or --set distill.top_k=0.",
    )


def router_terms_from_config(cfg: RouterConfig) -> list[Term]:
    """Return the terms of `router.terms`; the metric of each is loss/<name>, before its weight."""
    return [Term(ROUTER_TERMS[name], x, f"loss/{name}") for name, x in cfg.term_weights.items()]


def parse_terms(text: str, recorded: Iterable[str] = ()) -> tuple[Term, ...]:
    """Return the terms of calls joined by "+": "my_module:z_loss(weight=1e-3) + …".

    `weight` is the term's; other options are the function's. The metric is loss/<function>.
    `recorded` are the arrays that `Ops.record` returns. Raises ConfigError for anything else.
    """
    key, terms = "loss.terms", []
    for call in split_calls(text):
        name, options = parse_call(call, key)
        weight = options.pop("weight", 1.0)
        require(
            isinstance(weight, int | float) and math.isfinite(weight),
            f"{key}: the weight of {name} must be a finite number, got {weight!r}. Try "
            f'--set "{key}={name}(weight=0.01)".',
        )
        fn = bind_function(name, options, key, (*ARRAYS["terms"], *recorded), {})
        terms.append(Term(fn, float(weight), f"loss/{name.rpartition(':')[2]}"))
    names = [term.name for term in terms]
    require(
        len(set(names)) == len(names),
        f"{key} must name each function once, got {text!r}: their metrics would be one.",
    )
    return tuple(terms)
