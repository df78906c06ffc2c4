# SPDX-License-Identifier: Apache-2.0
"""The protocol of an engine, and what some engines offer in addition.

Next: jaxmoe/rollout/native.py, which shares the trainer's forward, and
jaxmoe/vllm/engine/vllm_engine.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import Config, describe_engine
from jaxmoe.model import Ops
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.replies import TokenEnvironment
from jaxmoe.shapes import Params


def open_engine(cfg: Config, ops: Ops, work: Path, mesh: Mesh | None = None) -> "Engine":
    """Open the engine of a run, which the caller closes; files of the engine are in `work`.

    `ops` are those of one device.
    """
    return describe_engine(cfg).open(cfg, ops, work, mesh)


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and log-probs out.

    A rollout's `rollout_logp` belongs to the distribution from which its tokens were sampled. If
    top-k or top-p truncate that distribution, `log_kept` is the log of the mass that they kept, in
    nats, so that rollout_logp + log_kept is over the full vocabulary. It is None if they are off,
    and for greedy answers.
    """

    @property
    def incidents(self) -> Sequence[str]:
        """Faults since the engine was opened from which it recovered, oldest first."""
        ...

    def load(self, params: Params, version: int) -> None:
        """Use these weights for all further samples; rollouts carry `version`.

        Returns when the engine has the weights; raises EngineError if it does not get them.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        samples: int = 1,
        environment: TokenEnvironment | None = None,
    ) -> list[Rollout]:
        """Return `samples` rollouts of each prompt, the samples of a prompt as neighbours.

        Each is complete, none is missing or repeated. Raises EngineError otherwise. With an
        environment a rollout is an episode: after each stop token the environment replies, and the
        policy continues, up to `sampling.max_turns` turns.
        """
        ...

    def close(self) -> None:
        """Stop everything that the engine started; may be called twice."""
        ...


@runtime_checkable
class BaseReader(Protocol):
    """An engine that reads the frozen base of a LoRA run without a copy of it."""

    def share_base(self, base: Params) -> None:
        """Declare weights that never change, in the dtypes that the forward reads."""
        ...


@runtime_checkable
class Pinnable(Protocol):
    """An engine that can go on with older weights while it samples with newer ones."""

    def pin(self) -> Engine:
        """Return an engine that samples one prompt at a time, with the present weights unless it
        was opened to go on with newer ones."""
        ...


@runtime_checkable
class FirstProcessEngine(Protocol):
    """An engine of several processes, of which the first samples for all."""

    @property
    def first_engine(self) -> Engine | None:
        """The engine that samples without the other processes, in any thread; None in those."""
        ...


@runtime_checkable
class SyncReporter(Protocol):
    """An engine that knows which part of the weights the last load() sent."""

    @property
    def sent_frac(self) -> float | None:
        """Bytes sent for each byte of the weights; None if nothing counts them."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """An engine that shows the doctor what it loaded and what it computes."""

    def loaded_states(self) -> list[dict[str, Any]]:
        """Return the loaded state of each of the engine's processes."""
        ...

    def record_forward(self, tokens: list[int]) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Return the log-probs of a sequence, and the outputs of the modules of each process.

        Raises EngineError if they cannot be recorded.
        """
        ...


@runtime_checkable
class Compilable(Protocol):
    """An engine whose programs can be compiled for devices that are not present."""

    def prompts_per_batch(self, samples: int) -> int: ...

    def compile_programs(
        self, make: Callable[..., Any], sampling: Sampling, params: Params, *, samples: int
    ) -> tuple[Any, Any]:
        """Return the compiled prefill and decode; see NativeEngine.compile_programs."""
        ...
