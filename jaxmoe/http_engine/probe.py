# SPDX-License-Identifier: Apache-2.0
"""The proof that a server samples from the weights that were sent: log-probs against the trainer's.

The probe's prompt is the same each time and longer than one block of the server's cache: only so
does a response computed from a cache of older weights show. Next: jaxmoe/http_engine/replica.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.config import EngineError, ModelConfig
from jaxmoe.http_engine.backend import Backend
from jaxmoe.http_engine.request import PromptRequest, sample_completions
from jaxmoe.records import Prompt, Sampling
from jaxmoe.weight_sync.update import WeightUpdate

CACHE_BLOCK_TOKENS = 128  # of vLLM's cache on a CPU, the largest default
MAX_PROBE_TOKENS = 8  # of the probe's response

Logps = Callable[[list[int]], np.ndarray]  # tokens -> float32 [T], the trainer's log-probs
NameSetting = Callable[[str, Any], str]  # (name, value) -> what the user types to set it


class WeightSyncError(EngineError):
    """A server does not hold the weights that were sent; a retry will not help."""


def name_option(name: str, value: Any) -> str:
    """Text that sets an option of an engine of the user's."""
    return f"{name}={value} among the options of rollout.engine"


@dataclass(frozen=True)
class ProbeReference:
    """The trainer's log-probs under some weights, for later syncs without these weights."""

    tokens: list[int]
    logp: np.ndarray


class Probe:
    """Two requests after each weight sync. `bound`: the maximum mean |Δlogp|, nats."""

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        bound: float,
        context: int,
        name_setting: NameSetting = name_option,
    ) -> None:
        self._cfg, self._bound, self._name_setting = cfg, bound, name_setting
        self._max_new = max(1, min(MAX_PROBE_TOKENS, context - 2))
        length = max(1, min(CACHE_BLOCK_TOKENS + 16, context - self._max_new - 1))
        tokens = np.random.default_rng(20).integers(0, cfg.vocab_size, length)
        self._prompt = Prompt(-1, "", tuple(int(t) for t in tokens), None)
        self.length = length + self._max_new  # of the tokens that `logps` gets
        # Fixed tokens of the same length, for a trainer that needs log-probs before the response.
        response_tokens = np.random.default_rng(21).integers(0, cfg.vocab_size, self._max_new)
        self.scored_tokens = [*self._prompt.tokens, *map(int, response_tokens)]

    def check_weights(
        self,
        backend: Backend,
        update: WeightUpdate,
        logps: Logps | None,
        reference: ProbeReference | None,
    ) -> ProbeReference:
        """Compare with the trainer's log-probs or, if its weights are gone, with the reference.

        Raises WeightSyncError beyond the bound.
        """
        label, name = update.label, backend.name
        seed = update.manifest["version"]
        sampling = Sampling(self._max_new, ())
        (response,) = sample_completions(
            backend, PromptRequest(0, self._prompt, 0, 1), sampling, seed, self._cfg
        )
        if set(response.labels) != {label}:
            raise WeightSyncError(
                f"{name} must sample from {label}, reports {sorted(set(response.labels))}"
            )
        tokens = [*self._prompt.tokens, *response.tokens]
        if logps is not None:
            reference = ProbeReference(tokens, logps(tokens))
        assert reference is not None, "weights are checked first while the trainer has them"
        engine_logp = self._score_tokens(backend, reference.tokens, label)
        self._check_gap(name, label, "given tokens", engine_logp[1:], reference.logp[1:])
        same_tokens = reference.tokens == tokens
        expected = reference.logp if same_tokens else self._score_tokens(backend, tokens, label)
        response_logp = np.asarray(response.logp, np.float32)
        self._check_gap(
            name, label, "its own response", response_logp, expected[-len(response_logp) :]
        )
        return reference

    def _score_tokens(self, backend: Backend, tokens: list[int], label: str) -> np.ndarray:
        engine_logp, scored_label = backend.score_tokens(tokens, self._cfg)
        if scored_label != label:
            raise WeightSyncError(
                f"{backend.name} must score with {label}, reports {scored_label!r}"
            )
        return engine_logp

    def _check_gap(
        self, name: str, label: str, subject: str, engine_logp: np.ndarray, trainer_logp: np.ndarray
    ) -> None:
        gap = float(np.mean(np.abs(engine_logp.astype(np.float64) - trainer_logp)))
        # Written so that NaN fails.
        if not gap <= self._bound:
            raise WeightSyncError(
                f"{name} must agree with the trainer on a probe of {label}: mean |Δlogp| of "
                f"{subject} is {gap:.3g}, more than {self._bound:g} nats. It has other weights, "
                "another dtype or another model, or continues from a cache of older weights; "
                "python -m jaxmoe.doctor finds the cause. If the dtypes explain the gap: "
                f"{self._name_setting('probe_abs_diff', f'{2 * gap:.2g}')}."
            )
