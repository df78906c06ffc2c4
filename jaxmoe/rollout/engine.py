# SPDX-License-Identifier: Apache-2.0
"""What an engine is. Next: jaxmoe/rollout/native.py, the one that shares the trainer's forward."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.shapes import Params


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and processed log-probs out."""

    def load(self, params: Params, version: int) -> None:
        """Sample from these weights from now on; rollouts carry `version`."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, the samples of one prompt side by side."""
        ...
