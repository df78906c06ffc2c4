# SPDX-License-Identifier: Apache-2.0
"""What an engine holds, by digests: what it received, what lives in its model, what is stale.

A loader that drops a tensor says nothing, so vLLM's word that weights are loaded is not enough.
Plain Python; live.py makes the digests. Next: worker.py, which reports this to the trainer.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.vllm_plugin.names import feeds


@dataclass(frozen=True)
class Fed:
    """A received tensor in the form that its parameter should have taken."""

    digest: str
    exact: bool  # the live parameter's digest must be this one; else it must change with it


@dataclass
class LoadedState:
    """Book of one engine; `label` is None while its weights are of no one whole publication."""

    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    label: str | None = None
    received: dict[str, str] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    _loaded: dict[str, str] = field(default_factory=dict)  # what the live parameter came from

    def publish(
        self,
        label: str,
        received: Mapping[str, str],
        fed: Mapping[str, Fed],
        before: Mapping[str, str],
        after: Mapping[str, str],
        unreadable: list[str],
    ) -> None:
        """Write down a publication; `before` and `after` are digests of the live parameters."""
        self.received, self.live = dict(received), dict(after)
        unseen = {feeds(name) for name in fed} - set(after)
        self.unreadable = sorted(unseen | set(unreadable))
        self.stale = [name for name in fed if not self._took(name, fed[name], before, after)]
        self.label = label

    def _took(
        self, name: str, fed: Fed, before: Mapping[str, str], after: Mapping[str, str]
    ) -> bool:
        """Whether a parameter holds what it was fed; what cannot be read is believed."""
        parameter = feeds(name)
        now = after.get(parameter)
        if now is None:
            return True
        if fed.exact:
            return now == fed.digest
        if now != before.get(parameter):
            self._loaded[name] = fed.digest
        # of the first publication alone nothing can be said: the same weights change nothing
        return self._loaded.setdefault(name, fed.digest) == fed.digest

    def torn(self) -> None:
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
