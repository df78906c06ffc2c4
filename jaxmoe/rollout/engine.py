# SPDX-License-Identifier: Apache-2.0
"""The protocol of an engine. Next: jaxmoe/rollout/native.py, which shares the trainer's forward,
and jaxmoe/vllm/engine.py.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.shapes import Params


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
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """Return `samples` rollouts of each prompt, the samples of a prompt as neighbours.

        Each is complete, none is missing or repeated. Raises EngineError otherwise.
        """
        ...

    def close(self) -> None:
        """Stop everything that the engine started; may be called twice."""
        ...
