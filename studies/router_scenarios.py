# SPDX-License-Identifier: Apache-2.0
"""Situations in which the experts of a sampler and a trainer differ, each with all its arrays.

    make_engine_scenarios: one update; the engine's router is noisy
    make_forward_scenario: one update; the old log-probs come from another, noisy forward
    make_update_scenario: several updates on answers that the weights before them sampled

Next: studies/router_remedies.py lists the estimators that are compared in them.
"""

from collections.abc import Callable

import jax
import numpy as np

from jaxmoe.shapes import Params
from studies.estimators import LogprobTable, Scenario, policy_gradient
from studies.micro_tables import MicroModel, Routing

N_SAMPLED = 16  # answers whose gradient the updates follow


def mark_switched_layers(a_BTLA: np.ndarray, b_BTLA: np.ndarray) -> np.ndarray:
    """Return True [B, T, L] where two forwards selected different sets of experts."""
    return (np.sort(a_BTLA, axis=-1) != np.sort(b_BTLA, axis=-1)).any(axis=-1)


def make_scenario(
    model: MicroModel,
    sampler_logp_BT: np.ndarray,
    forwards: dict[str, LogprobTable],
    targets: dict[str, np.ndarray],
    *,
    rollout_logp_BT: np.ndarray,
    old_logp_BT: np.ndarray,
    current: Routing,
    old: Routing,
    engine: Routing,
) -> Scenario:
    """Return a scenario with the arrays that losses take by name.

    As in a training batch, a row has one token that is not trained, the prompt, and the routing at
    a position is that of the token after it.
    """
    sampler_B = np.exp(sampler_logp_BT.sum(axis=1))
    # The advantage of an infinite group: the reward minus its mean under the sampler.
    advantages_B = model.rewards_B - sampler_B @ model.rewards_B
    shape = model.answers.tokens_BT.shape
    mask_BT = add_prompt(np.ones(shape, bool))
    switched_BT, old_switched_BT = (
        add_prompt(
            np.asarray(mark_switched_layers(current.experts_BTLA, x.experts_BTLA).any(axis=-1))
        )
        for x in (engine, old)
    )
    arrays = {
        "mask_BT": mask_BT,
        "token_mask_BT": np.ones_like(mask_BT),
        "advantages_BT": add_prompt(np.broadcast_to(advantages_B[:, None], shape)),
        "rollout_logp_BT": add_prompt(rollout_logp_BT),
        "old_logp_BT": add_prompt(old_logp_BT),
        "router_logits_BTLE": add_last_position(current.router_logits_BTLE),
        "old_router_logits_BTLE": add_last_position(old.router_logits_BTLE),
        "experts_BTLA": add_last_position(current.experts_BTLA),
        "old_experts_BTLA": add_last_position(old.experts_BTLA),
        "routed_experts_BTLA": add_last_position(engine.experts_BTLA),
        "experts_E": np.arange(model.sizes.n_experts, dtype=np.int32),
        "switched_BT": switched_BT,
        "old_switched_BT": old_switched_BT,
    }
    return Scenario(model.answers.pairs_BT, sampler_B, advantages_B, forwards, arrays, targets)


def add_prompt(x_BT: np.ndarray) -> np.ndarray:
    """Return arrays of tokens with a column for the prompt in front."""
    return np.pad(x_BT, ((0, 0), (1, 0)))


def add_last_position(x_BTLA: np.ndarray) -> np.ndarray:
    """Return arrays of positions with one for the last token, which predicts nothing."""
    return np.pad(x_BTLA, ((0, 0), (0, 1), (0, 0), (0, 0)))


def make_engine_scenarios(
    model: MicroModel, scale: float, *, noise: str
) -> tuple[Scenario, dict[str, Scenario], dict[str, float]]:
    """Return the scenario of an engine with a noisy router, those of other routers, and statistics.

    noise: "selection" for noise on the logits by which the engine selects, "weights" for noise on
        its router's weights.
    Targets are the policy gradients of the trainer and of the engine. The other routers, "soft" and
    "annealed", are other policies, so their targets are their own.
    """
    table, routing = model.current
    if noise == "selection":
        engine_params = model.params
        engine_logp_BT, engine, replayed = model.replay_noisy(scale)
        # Its weights come from the logits without noise, so replay computes the engine's policy.
        engine_table = replayed
        routers = ["soft"]
    else:
        engine_params = model.add_router_noise(scale)
        engine_logp_BT, engine = model.run_logprobs(engine_params)
        engine_table = model.make_table(engine_params, engine_logp_BT)
        replayed = model.make_replayed_table(model.params, engine)
        routers = ["soft", "annealed"]
    scenario = make_scenario(
        model,
        engine_logp_BT,
        {"current": table, "replayed": replayed, "straight_through": model.straight_through},
        find_targets(model, table, engine_table),
        rollout_logp_BT=engine_logp_BT,
        old_logp_BT=engine_logp_BT,
        current=routing,
        old=engine,
        engine=engine,
    )
    statistics = describe_gap(scenario.sampler_B, table.logp_BT, engine_logp_BT, routing, engine)
    replayed_gap_BT = np.abs(replayed.logp_BT - engine_logp_BT)
    statistics["gap_replayed"] = float(scenario.sampler_B @ replayed_gap_BT.mean(axis=1))
    soft_scenarios = {}
    for router in routers:
        soft = engine_soft = model.route_by(router)
        if noise == "weights":
            soft_logp_BT, _ = model.run_logprobs(engine_params, router)
            engine_soft = model.make_table(engine_params, soft_logp_BT, router)
        soft_scenarios[router] = make_scenario(
            model,
            engine_soft.logp_BT,
            {"current": soft},
            find_targets(model, soft, engine_soft),
            rollout_logp_BT=engine_soft.logp_BT,
            old_logp_BT=engine_soft.logp_BT,
            current=routing,
            old=routing,
            engine=routing,
        )
        gap_BT = np.abs(soft.logp_BT - engine_soft.logp_BT)
        statistics[f"gap_{router}"] = float(soft_scenarios[router].sampler_B @ gap_BT.mean(axis=1))
    return scenario, soft_scenarios, statistics


def find_targets(
    model: MicroModel, trainer: LogprobTable, engine: LogprobTable
) -> dict[str, np.ndarray]:
    """Return the policy gradients of the trainer and of the engine."""
    tables = {"trainer": trainer, "engine": engine}
    pairs_BT, rewards_B = model.answers.pairs_BT, model.rewards_B
    return {name: policy_gradient(x, pairs_BT, rewards_B) for name, x in tables.items()}


def make_forward_scenario(model: MicroModel, scale: float) -> tuple[Scenario, dict[str, float]]:
    """Return the scenario of on-policy samples whose old log-probs another forward computed.

    That forward has noise on the logits by which it selects. The engine is the trainer's forward.
    """
    table, routing = model.current
    noisy_logp_BT, noisy, replayed = model.replay_noisy(scale)
    forwards = {"current": table, "replayed": replayed, "straight_through": model.straight_through}
    scenario = make_scenario(
        model,
        table.logp_BT,
        forwards,
        {"trainer": policy_gradient(table, model.answers.pairs_BT, model.rewards_B)},
        rollout_logp_BT=table.logp_BT,
        old_logp_BT=noisy_logp_BT,
        current=routing,
        old=noisy,
        engine=routing,
    )
    gap = describe_gap(scenario.sampler_B, table.logp_BT, noisy_logp_BT, routing, noisy)
    return scenario, gap


def make_update_scenario(
    model: MicroModel, step: float, *, router: str = "replay", trains_router: bool = True
) -> tuple[Scenario, dict[str, float]]:
    """Return the scenario after updates on answers of the model before them.

    All parameters have moved by `step` along the sign of the gradient of a few sampled answers, as
    Adam's first steps do. `router` is "replay" for top-k, "soft" or "annealed". The replayed
    forward takes the experts of the model before the updates (R2).
    """
    old_table = model.current[0] if router == "replay" else model.route_by(router)
    old = model.current[1]
    keep_N = np.ones(len(model.is_router_N)) if trains_router else 1.0 - model.is_router_N
    params = move_params(model, old_table, step, keep_N)
    logp_BT, routing = model.run_logprobs(params, router)
    table = model.make_table(params, logp_BT, router)
    target_N = policy_gradient(table, model.answers.pairs_BT, model.rewards_B) * keep_N
    forwards = {"current": table}
    if router == "replay":
        forwards["replayed"] = model.make_replayed_table(params, old)
        if trains_router:
            forwards["straight_through"] = model.make_table(params, logp_BT, "straight_through")
    scenario = make_scenario(
        model,
        old_table.logp_BT,
        forwards,
        {"trainer": target_N},
        rollout_logp_BT=old_table.logp_BT,
        old_logp_BT=old_table.logp_BT,
        current=routing,
        old=old,
        engine=old,
    )
    statistics = describe_gap(scenario.sampler_B, logp_BT, old_table.logp_BT, routing, old)
    value = table.answer_probs_B @ model.rewards_B
    old_value = scenario.sampler_B @ model.rewards_B
    statistics["value_change"] = float(abs(value - old_value))
    for name in forwards.keys() - {"straight_through"}:  # its log-probs are the current ones
        forward = forwards[name]
        ratios_BT = np.exp(forward.logp_BT - old_table.logp_BT)
        gain = scenario.sampler_B @ ((ratios_BT - 1.0).sum(axis=1) * scenario.advantages_B)
        statistics[f"surrogate_error_{name}"] = float(abs(value - old_value - gain))
    return scenario, statistics


def move_params(model: MicroModel, table: LogprobTable, step: float, keep_N: np.ndarray) -> Params:
    """Return params after a step along the sign of the gradient of a few sampled answers."""
    rng = np.random.default_rng((model.seed, 3))
    probs_B = table.answer_probs_B
    sampled = rng.choice(len(probs_B), N_SAMPLED, p=probs_B / probs_B.sum())
    advantages = model.rewards_B[sampled] - probs_B @ model.rewards_B
    weights_P = np.zeros(len(table.gram_PP))
    np.add.at(weights_P, model.answers.pairs_BT[sampled], advantages[:, None])
    params_N, unravel = ravel_numpy(model.params)
    return unravel(params_N + step * np.sign(weights_P @ table.gradients_PN) * keep_N)


def ravel_numpy(params: Params) -> tuple[np.ndarray, Callable[[np.ndarray], Params]]:
    """Return the parameters as one float64 vector, and the function that undoes it."""
    leaves, tree = jax.tree.flatten(params)
    ends = np.cumsum([x.size for x in leaves])[:-1]

    def unravel_params(params_N: np.ndarray) -> Params:
        parts = np.split(params_N, ends)
        shaped = [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(tree, shaped)

    return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves]), unravel_params


def describe_gap(
    sampler_B: np.ndarray,
    logp_BT: np.ndarray,
    reference_logp_BT: np.ndarray,
    routing: Routing,
    reference: Routing,
) -> dict[str, float]:
    """Return how far two forwards are apart, averaged over sampled answers."""
    switched_BTL = mark_switched_layers(routing.experts_BTLA, reference.experts_BTLA)
    gap_BT = logp_BT - reference_logp_BT
    shares = {
        "switched": switched_BTL.mean(axis=(1, 2)),
        "switched_answers": switched_BTL.any(axis=(1, 2)),
        "gap": np.abs(gap_BT).mean(axis=1),
        "k3": (np.expm1(gap_BT) - gap_BT).mean(axis=1),
    }
    return {name: float(sampler_B @ x) for name, x in shares.items()}
