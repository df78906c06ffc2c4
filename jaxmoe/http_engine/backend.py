# SPDX-License-Identifier: Apache-2.0
"""The interface of one running server: all that a pool asks of it, for any kind of server.

vLLM's are jaxmoe/vllm/client/http_backend.py and jaxmoe/vllm/engine/in_process_backend.py.
Next: jaxmoe/http_engine/replica.py tracks a server's weights; pooled_engine.py distributes the work
over several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.records import Sampling
from jaxmoe.weight_sync.update import WeightUpdate


class RequestFailed(RuntimeError):
    """No usable response arrived: a retry, or another replica, may help."""


@dataclass(frozen=True)
class SampleRequest:
    """A request for `count` samples after these tokens; sample i uses the seed `seed` + i."""

    tokens: list[int]
    count: int
    max_tokens: int  # of each sample
    seed: int
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """The tokens of one sample that were sampled in one request."""

    tokens: list[int]
    logp: list[float]
    finish: str  # stop, length or abort
    labels: list[str]  # of the weights, one per token
    experts: np.ndarray | None  # expert_dtype [P+T-1, L, A], as of a Rollout


@dataclass(frozen=True)
class Workers:
    """The workers of one server: `names` change at a restart, `rows` are the sequences at once."""

    names: list[str]
    labels: list[str]  # of the weights that each holds
    rows: int


@runtime_checkable
class Backend(Protocol):
    """Interface of a server.

    Every method may be called from several threads and raises RequestFailed on failure.
    """

    name: str  # for messages: a URL, or "this process"

    def sample(self, request: SampleRequest, cfg: ModelConfig) -> list[Completion]:
        """Return the samples in order, checked (`completions.check_sampled`).

        A sample that a weight sync aborted has the finish `abort`, and is continued by the caller.
        """
        ...

    def score_tokens(self, tokens: list[int], cfg: ModelConfig) -> tuple[np.ndarray, str]:
        """Return the log-prob of each token at temperature 1, 0 for the first; weights' label."""
        ...

    def max_context(self) -> int:
        """Return the maximum number of tokens of prompt and response together."""
        ...

    def check_health(self) -> None:
        """Return soon if the server answers, else raise."""
        ...

    def read_workers(self) -> Workers:
        """Return the server's workers. Raises ConfigError if its settings make training wrong."""
        ...

    def load_weights(
        self,
        update: WeightUpdate,
        mode: str,
        invalidate: Callable[[], None],
        worker_names: list[str],
    ) -> None:
        """Load the weights under `update.label`; return when it samples from them.

        mode: what becomes of requests in flight: keep, wait or abort.
        invalidate: is called, after a failure, before the server samples again.
        worker_names: of its workers, which must be the same afterwards.
        Raises EngineError if it holds other weights than were sent.
        """
        ...

    def close(self) -> None:
        """Release it; may be called twice."""
        ...


@runtime_checkable
class ServerProcess(Protocol):
    """A server that this run started."""

    log: Path

    def start(self) -> Backend:
        """Start it, again if it runs. Raises EngineError."""
        ...

    def is_alive(self) -> bool: ...

    def stop(self) -> None: ...
