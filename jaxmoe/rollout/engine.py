# SPDX-License-Identifier: Apache-2.0
"""What an engine is. Next: jaxmoe/rollout/native.py, the one that shares the trainer's forward,
and jaxmoe/vllm/engine.py.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.shapes import Params


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and processed log-probs out.

    A rollout's `rollout_logp` is of the distribution that its tokens were drawn from. Where top-k
    or top-p cut that distribution, `log_kept` is the log of the mass they kept, in nats, so that
    rollout_logp + log_kept is over the whole vocabulary; where they are off it is None, and so it
    is in greedy answers, of which nothing can be cut.
    """

    @property
    def incidents(self) -> Sequence[str]:
        """What went wrong since the engine was opened, and was mended; oldest first."""
        ...

    def load(self, params: Params, version: int) -> None:
        """Sample from these weights from now on; rollouts carry `version`.

        Returns when the engine is known to hold them; raises EngineError where it does not.
        """
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, the samples of one prompt side by side.

        Each is whole: none is lost, none is there twice. Raises EngineError otherwise.
        """
        ...

    def close(self) -> None:
        """Stop what was started; may be called twice."""
        ...
