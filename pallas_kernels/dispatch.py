# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs: the only place that asks for the platform."""

import difflib
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax

_log = logging.getLogger("pallas_kernels")


Run = TypeVar("Run", bound=Callable[..., Any])
Impl = str | tuple[str, ...]  # "auto", a name, or names of which the first that can is taken


@dataclass(frozen=True)
class Implementation(Generic[Run]):
    """A function with the operation's signature (`Run`), and what keeps it from some shapes."""

    run: Run
    unsupported: Callable[..., str | None]  # of the arrays given to `pick`: the reason, or None
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    proven: bool = True  # it has run on such a chip and was right; "auto" takes no other


def lazily(
    module: str,
    run: str,
    platforms: tuple[str, ...],
    unsupported: str = "unsupported",
    *,
    proven: bool,
) -> Implementation[Any]:
    """An implementation whose module is imported when its platform asks for it: compilers of
    kernels for other machines take a second to import."""

    def later(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(module), name)(*args, **options)

        call.__module__, call.__name__ = module, name
        return call

    return Implementation(later(run), later(unsupported), platforms, proven)


def mosaic(
    package: str, variant: str = "", proven: tuple[str, ...] = ()
) -> dict[str, Implementation[Any]]:
    """The package's Pallas kernels: `mosaic_gpu` of its pallas_gpu, `mosaic_tpu` of its pallas_tpu.

    A variant of the operation (`_paged`, `_swiglu`) is a suffix of these names and of
    `unsupported`; `proven` names the kernels that a chip has shown to be right.
    """
    return {
        f"mosaic_{chip}": lazily(
            f"{package}.pallas_{chip}", f"mosaic_{chip}{variant}", (chip,),
            f"unsupported{variant}", proven=f"mosaic_{chip}" in proven,
        )
        for chip in ("gpu", "tpu")
    }  # fmt: skip


class Target(NamedTuple):
    """What the code being traced will run on."""

    platform: str  # cpu, gpu or tpu
    kind: str  # the vendor's name of the device

    @property
    def hopper(self) -> bool:
        """Compute capability 9.0, the one chip with wgmma."""
        return any(name in self.kind for name in ("H100", "H200", "H800", "H20", "GH200"))


def target() -> Target:
    """The device of the mesh in context, which may be another machine's; else this machine's."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is not None:
        return Target(device.platform, device.device_kind)
    return Target(jax.default_backend(), jax.devices()[0].device_kind)


def gpu_cores() -> int:
    """Streaming multiprocessors of the GPU that `target` names; two where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    count = device.num_cores if device else getattr(jax.devices()[0], "core_count", None)
    return count or 2


def pick(impl: Impl, impls: Mapping[str, Implementation[Run]], *arrays: Any) -> Run:
    """The function to call; `impls` stands in order of preference.

    "auto" takes the first that runs here and has been proven, and logs, once, its choice and why
    not those before it.
    A named one never falls back. Of several names the first that can run these shapes is taken,
    proven or not: who names them has checked them (`pallas_kernels.check`).
    Only shapes and dtypes of the arrays are read.
    Raises: ValueError for an unknown name; NotImplementedError, with the reasons, where none named
    can run these shapes on this platform.
    """
    platform = target().platform
    if impl != "auto":
        names = (impl,) if isinstance(impl, str) else tuple(impl)
        unknown = next((name for name in names if name not in impls), None)
        if unknown is not None or not names:
            wrong = impl if unknown is None else unknown
            near = difflib.get_close_matches(str(unknown), [*impls, "auto"], 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: auto, {', '.join(impls)}."
            raise ValueError(f"impl must name an implementation, got {wrong!r}. {hint}")
        reasons = {}
        for name in names:
            reasons[name] = _reason(impls[name], platform, arrays)
            if reasons[name] is None:
                return impls[name].run
        told = "; ".join(str(reason) for reason in reasons.values())
        raise NotImplementedError(f"impl={impl!r} cannot run here: {told}. Try impl='auto'.")
    reasons = []
    for name, candidate in impls.items():
        reason = _reason(candidate, platform, arrays)
        if reason is None and not candidate.proven:
            reason = f"interpreted and compiled, but never run on a chip; impl={name!r} tries it"
        if reason is None:
            since = f", since {'; '.join(reasons)}" if reasons else ""
            _say_once(f"{candidate.run.__module__} on {platform}{since}")
            return candidate.run
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"no implementation runs on {platform}: " + "; ".join(reasons))


def _reason(candidate: Implementation[Any], platform: str, arrays: tuple[Any, ...]) -> str | None:
    if platform not in candidate.platforms:
        return f"it needs {' or '.join(candidate.platforms)}, this is {platform}"
    return candidate.unsupported(*arrays)


@functools.lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    _log.info(message)
