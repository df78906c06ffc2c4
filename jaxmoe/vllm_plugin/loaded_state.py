# SPDX-License-Identifier: Apache-2.0
"""What a vLLM worker has loaded, by digests: what it received, what is live, what is stale.

A loader that drops a tensor says nothing, so vLLM's word that weights are loaded is not enough.
Plain Python; live.py makes the digests. Next: worker.py, which reports this to the trainer.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.vllm_plugin.names import parameter_of


@dataclass(frozen=True)
class ExpectedParameter:
    """A received tensor in the form that its parameter should have taken."""

    digest: str
    exact: bool  # the live parameter's digest must be this one; else it must change with it
    parameter: str = ""  # where it goes; empty: where a checkpoint's tensor of its name does


@dataclass
class LoadedState:
    """Of one transfer engine; `label` is None while its weights are of no one whole update."""

    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    label: str | None = None
    received: dict[str, str] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    _source: dict[str, str] = field(default_factory=dict)  # what the live parameter came from

    def record(
        self,
        label: str,
        received: Mapping[str, str],
        expected: Mapping[str, ExpectedParameter],
        before: Mapping[str, str],
        after: Mapping[str, str],
        unreadable: list[str],
    ) -> None:
        """Record a weight update; `before` and `after` are digests of the live parameters."""
        self.received, self.live = dict(received), dict(after)
        unseen = {x.parameter or parameter_of(name) for name, x in expected.items()} - set(after)
        self.unreadable = sorted(unseen | set(unreadable))
        self.stale = [
            name for name in expected if not self._is_loaded(name, expected[name], before, after)
        ]
        self.label = label

    def _is_loaded(
        self,
        name: str,
        expected: ExpectedParameter,
        before: Mapping[str, str],
        after: Mapping[str, str],
    ) -> bool:
        """Whether a parameter holds what it should; what cannot be read is taken to."""
        parameter = expected.parameter or parameter_of(name)
        now = after.get(parameter)
        if now is None:
            return True
        if expected.exact:
            return now == expected.digest
        if now != before.get(parameter):
            self._source[name] = expected.digest
        # of the first update alone nothing can be said: the same weights change nothing
        return self._source.setdefault(name, expected.digest) == expected.digest

    def invalidate(self) -> None:
        """Weights are changing, or a change of them broke off."""
        self.label = None

    def report(self, live: Mapping[str, str], unreadable: list[str]) -> dict[str, Any]:
        """For the trainer; `live` is of now, and no label stands for weights changed since."""
        return {
            "instance": self.instance,
            "label": self.label if live == self.live else None,
            "received": dict(self.received),
            "live": dict(live),
            "stale": list(self.stale),
            "unreadable": sorted({*unreadable, *self.unreadable}),
        }
