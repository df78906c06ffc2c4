# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs: the only place that asks for the platform."""

import difflib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

_log = logging.getLogger("pallas_kernels")


@dataclass(frozen=True)
class Implementation:
    """A function with the signature of `reference`, and what keeps it from some shapes."""

    run: Callable[..., Any]
    unsupported: Callable[..., str | None]  # of the shapes given to `pick`: the reason, or None
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")


def pick(impl: str, impls: Mapping[str, Implementation], *shapes: Any) -> Callable[..., Any]:
    """The function to call; `impls` stands in order of preference.

    "auto" takes the first that runs here and logs, once, its choice and why not those before it.
    A named one never falls back.
    Raises: ValueError for an unknown name; NotImplementedError, with the reason, for a named
    implementation that cannot run these shapes on this platform.
    """
    platform = jax.default_backend()
    if impl != "auto":
        if impl not in impls:
            near = difflib.get_close_matches(impl, [*impls, "auto"], 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: auto, {', '.join(impls)}."
            raise ValueError(f"impl must name an implementation, got {impl!r}. {hint}")
        reason = _reason(impls[impl], platform, shapes)
        if reason is not None:
            raise NotImplementedError(f"impl={impl!r} cannot run here: {reason}. Try impl='auto'.")
        return impls[impl].run
    reasons = []
    for name, candidate in impls.items():
        reason = _reason(candidate, platform, shapes)
        if reason is None:
            since = f", since {'; '.join(reasons)}" if reasons else ""
            _say_once(f"{candidate.run.__module__} on {platform}{since}")
            return candidate.run
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"no implementation runs on {platform}: " + "; ".join(reasons))


def _reason(candidate: Implementation, platform: str, shapes: tuple[Any, ...]) -> str | None:
    if platform not in candidate.platforms:
        return f"it needs {' or '.join(candidate.platforms)}, this is {platform}"
    return candidate.unsupported(*shapes)


@functools.lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    _log.info(message)
