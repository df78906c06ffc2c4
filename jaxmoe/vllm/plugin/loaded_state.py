# SPDX-License-Identifier: Apache-2.0
"""The weights that a vLLM worker has loaded, by digests: received, live and stale tensors.

A loader that drops a tensor reports no error, so vLLM's answer that weights are loaded is not
enough. Plain Python; live_parameters.py makes the digests. Next: worker.py, which reports this to
the trainer.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.vllm.plugin.names import vllm_parameter_name


@dataclass(frozen=True)
class ExpectedParameter:
    """A received tensor in the form that its parameter should have after loading."""

    digest: str
    exact: bool  # True: the live digest must equal this one; else they must change together
    parameter: str = ""  # its live parameter; empty: vllm_parameter_name of the tensor


@dataclass
class LoadedState:
    """State of one transfer engine; `label` is None unless its weights are one complete update."""

    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    label: str | None = None
    received: dict[str, str] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    # Digest of the tensor that the live parameter came from.
    _source: dict[str, str] = field(default_factory=dict)

    def record_update(
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
        unseen = {x.parameter or vllm_parameter_name(name) for name, x in expected.items()} - set(
            after
        )
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
        """Return True if a parameter holds what it should; unreadable ones are assumed to."""
        parameter = expected.parameter or vllm_parameter_name(name)
        live_digest = after.get(parameter)
        if live_digest is None:
            return True
        if expected.exact:
            return live_digest == expected.digest
        if live_digest != before.get(parameter):
            self._source[name] = expected.digest
        # After the first update nothing can be concluded: equal weights change no parameter.
        return self._source.setdefault(name, expected.digest) == expected.digest

    def invalidate(self) -> None:
        """Clear the label: weights are changing, or a change of them failed."""
        self.label = None

    def build_report(self, live: Mapping[str, str], unreadable: list[str]) -> dict[str, Any]:
        """Return the report for the trainer; no label if the parameters changed since the update.

        `live` are the current digests of the parameters.
        """
        return {
            "instance": self.instance,
            "label": self.label if live == self.live else None,
            "received": dict(self.received),
            "live": dict(live),
            "stale": list(self.stale),
            "unreadable": sorted({*unreadable, *self.unreadable}),
        }
