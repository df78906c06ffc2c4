# SPDX-License-Identifier: Apache-2.0
"""Micro models with the log-probs and gradients of all their answers, in float64.

Next: studies/router_scenarios.py compares two forwards of a model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxmoe.model.moe.router import replay_routing
from jaxmoe.model.moe.soft_routing import route_annealed, route_softly, route_straight_through
from jaxmoe.records import UNKNOWN_EXPERT
from jaxmoe.shapes import Params
from studies.estimators import LogprobTable
from studies.micro_model import (
    Answers,
    MicroSizes,
    answer_logprobs,
    make_micro_params,
    make_rewards,
    route_by_noisy_logits,
)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class MicroPrograms:
    """Compiled functions of the micro models of one size, shared by all models and scenarios."""

    def __init__(self, sizes: MicroSizes, compile_function: Compile) -> None:
        self.sizes, self.answers = sizes, Answers(sizes.length)
        self.logprobs, self.gradients = {}, {}
        for name, router in (
            ("replay", replay_routing),
            ("straight_through", route_straight_through),
            ("soft", route_softly),
            ("annealed", partial(route_annealed, steps=2)),
        ):
            run = partial(self._run, router)
            self.logprobs[name] = compile_function(run)
            self.gradients[name] = compile_function(partial(_gradients_of_pairs, run))
        self.noisy_logprobs = compile_function(self._run_noisy)

    def _run(
        self,
        router: Callable[..., Any],
        params: Params,
        inputs_BT: Any,
        tokens_BT: Any,
        routed_BTLA: Any,
    ) -> Any:
        routed_BTLA = routed_BTLA if router is replay_routing else None
        return answer_logprobs(params, inputs_BT, tokens_BT, self.sizes.config, router, routed_BTLA)

    def _run_noisy(self, params: Params, inputs_BT: Any, tokens_BT: Any, noise_LBTE: Any) -> Any:
        router = partial(route_by_noisy_logits, noise_LBTE=noise_LBTE)
        return answer_logprobs(params, inputs_BT, tokens_BT, self.sizes.config, router)


def _gradients_of_pairs(
    run: Callable[..., Any],
    params: Params,
    inputs_PT: Any,
    tokens_PT: Any,
    routed_PTLA: Any,
    columns_P: Any,
) -> Any:
    """Return the gradient [P, N] of one token's log-prob in each row."""

    def gradient_of_row(inputs_T: Any, tokens_T: Any, routed_TLA: Any, column: Any) -> Any:
        def logprob(params: Params) -> Any:
            logp_BT, _ = run(params, inputs_T[None], tokens_T[None], routed_TLA[None])
            return logp_BT[0, column]

        return ravel_pytree(jax.grad(logprob)(params))[0]

    return jax.vmap(gradient_of_row)(inputs_PT, tokens_PT, routed_PTLA, columns_P)


@dataclass(frozen=True)
class Routing:
    """Router logits and experts of a forward over all answers."""

    router_logits_BTLE: np.ndarray
    experts_BTLA: np.ndarray


class MicroModel:
    """One random policy, its rewards, and the tables of log-probs and gradients of it."""

    def __init__(self, programs: MicroPrograms, seed: int) -> None:
        self.programs, self.seed = programs, seed
        self.answers, self.sizes = programs.answers, programs.sizes
        # One dtype for all params, since another one would be compiled again.
        self.params = jax.tree.map(
            lambda x: np.asarray(x, np.float64), make_micro_params(seed, self.sizes)
        )
        self.rewards_B = make_rewards(seed, self.answers)
        self._replays: dict[float, tuple[np.ndarray, Routing, LogprobTable]] = {}
        self._policies: dict[str, LogprobTable] = {}
        paths = jax.tree_util.tree_leaves_with_path(self.params)
        self.is_router_N = np.concatenate(
            [np.full(x.size, "router" in jax.tree_util.keystr(path)) for path, x in paths]
        )

    def run_logprobs(
        self, params: Params, router: str = "replay", routed_BTLA: np.ndarray | None = None
    ) -> tuple[np.ndarray, Routing]:
        """Return log-probs [B, T] and routing; by the router's selection without `routed_BTLA`."""
        answers = self.answers
        return _to_numpy(
            self.programs.logprobs[router](
                params, answers.inputs_BT, answers.tokens_BT, self._routed(routed_BTLA)
            )
        )

    def run_noisy(self, params: Params, noise_LBTE: np.ndarray) -> tuple[np.ndarray, Routing]:
        """Return log-probs and routing by an engine with noise on the logits of the selection."""
        answers = self.answers
        return _to_numpy(
            self.programs.noisy_logprobs(params, answers.inputs_BT, answers.tokens_BT, noise_LBTE)
        )

    def make_table(
        self,
        params: Params,
        logp_BT: np.ndarray,
        router: str = "replay",
        routed_BTLA: np.ndarray | None = None,
    ) -> LogprobTable:
        """Return the table of log-probs that `run_logprobs` returned, with their gradients."""
        rows_P, columns_P = self.answers.pair_places_P2.T
        gradients_PN = np.asarray(
            self.programs.gradients[router](
                params,
                self.answers.inputs_BT[rows_P],
                self.answers.tokens_BT[rows_P],
                self._routed(routed_BTLA)[rows_P],
                columns_P.astype(np.int32),
            )
        )
        return LogprobTable(logp_BT, gradients_PN, gradients_PN @ gradients_PN.T)

    def make_replayed_table(self, params: Params, replayed: Routing) -> LogprobTable:
        """Return the table of a forward that takes another one's experts."""
        logp_BT, _ = self.run_logprobs(params, routed_BTLA=replayed.experts_BTLA)
        return self.make_table(params, logp_BT, routed_BTLA=replayed.experts_BTLA)

    def replay_noisy(self, scale: float) -> tuple[np.ndarray, Routing, LogprobTable]:
        """Return log-probs and routing of the noisy forward, and the table that replays it."""
        if scale not in self._replays:
            logp_BT, noisy = self.run_noisy(self.params, scale * self.draw_noise())
            self._replays[scale] = logp_BT, noisy, self.make_replayed_table(self.params, noisy)
        return self._replays[scale]

    def draw_noise(self) -> np.ndarray:
        """Return standard normal noise [L, B, T, E], equal for tokens with equal prefixes."""
        sizes = self.sizes
        shape = (sizes.n_layers, self.answers.n_prefixes, sizes.n_experts)
        noise_LQE = np.random.default_rng((self.seed, 1)).normal(size=shape)
        return noise_LQE[:, self.answers.prefixes_BT]

    def add_router_noise(self, scale: float) -> Params:
        """Return params with noise on the router's weights, of `scale` on a logit."""
        rng = np.random.default_rng((self.seed, 2))

        def add_noise(path: Any, x: np.ndarray) -> np.ndarray:
            if "w_router" not in jax.tree_util.keystr(path):
                return x
            # The norm makes the router's input of unit mean square, so the deviation of a logit
            # is that of a weight times the root of the width.
            return x + scale / np.sqrt(x.shape[-2]) * rng.normal(size=x.shape)

        return jax.tree_util.tree_map_with_path(add_noise, self.params)

    @cached_property
    def current(self) -> tuple[LogprobTable, Routing]:
        logp_BT, routing = self.run_logprobs(self.params)
        return self.make_table(self.params, logp_BT), routing

    @cached_property
    def straight_through(self) -> LogprobTable:
        return self.make_table(self.params, self.current[0].logp_BT, "straight_through")

    def route_by(self, router: str) -> LogprobTable:
        """Return the table of the policy whose router is "soft" or, halfway, "annealed"."""
        if router not in self._policies:
            logp_BT, _ = self.run_logprobs(self.params, router)
            self._policies[router] = self.make_table(self.params, logp_BT, router)
        return self._policies[router]

    def _routed(self, routed_BTLA: np.ndarray | None) -> np.ndarray:
        if routed_BTLA is not None:
            return routed_BTLA
        shape = (*self.answers.tokens_BT.shape, self.sizes.n_layers, self.sizes.active)
        return np.full(shape, UNKNOWN_EXPERT, np.int32)


def _to_numpy(result: Any) -> tuple[np.ndarray, Routing]:
    logp_BT, recorded = jax.tree.map(np.asarray, result)
    return logp_BT, Routing(**recorded)
