# SPDX-License-Identifier: Apache-2.0
"""Selection of an implementation; the only place that reads the platform."""

import difflib
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import jax

_log = logging.getLogger("pallas_kernels")


Run = TypeVar("Run", bound=Callable[..., Any])
Impl = str | tuple[str, ...]  # "auto", a name, or names: the first that can run is selected


class KernelUnsupported(NotImplementedError):
    """No requested implementation can run these shapes here; `reason` lacks the advice."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def supports_every_shape(*_arrays: Any) -> str | None:
    """Return None: there is no shape that the implementation cannot take."""
    return None


@dataclass(frozen=True)
class Implementation(Generic[Run]):
    """A function with the operation's signature (`Run`), and the conditions under which it runs."""

    run: Run
    # of the arrays given to `select_implementation`: the reason, or None
    unsupported: Callable[..., str | None] = supports_every_shape
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    proven: bool = True  # it has run correctly on such a chip; "auto" selects only these


def lazy_implementation(
    module: str,
    run: str,
    platforms: tuple[str, ...],
    unsupported: str | None = None,
    *,
    proven: bool,
) -> Implementation[Any]:
    """An implementation whose module is imported by the first call of its function `run`.

    `unsupported` names the function of the same module that says why shapes do not fit, by default
    `{run}_unsupported`. Importing the compilers of kernels for other machines takes a second.
    """

    def lazy_function(name: str) -> Callable[..., Any]:
        def call_lazily(*args: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(module), name)(*args, **options)

        call_lazily.__module__, call_lazily.__name__ = module, name
        return call_lazily

    unsupported = unsupported or f"{run}_unsupported"
    return Implementation(lazy_function(run), lazy_function(unsupported), platforms, proven)


def mosaic_implementations(
    package: str, op: str, proven: tuple[str, ...] = ()
) -> dict[str, Implementation[Any]]:
    """The Pallas kernels of an operation: `{op}_mosaic_gpu` in the package's pallas_gpu.py, and
    `{op}_mosaic_tpu` in its pallas_tpu.py, each with its `..._unsupported`.

    `proven` names the kernels that a chip has shown to be right.
    """
    return {
        f"mosaic_{chip}": lazy_implementation(
            f"{package}.pallas_{chip}",
            f"{op}_mosaic_{chip}",
            (chip,),
            proven=f"mosaic_{chip}" in proven,
        )
        for chip in ("gpu", "tpu")
    }


def invariant_implementations(package: str, op: str) -> dict[str, Implementation[Any]]:
    """The batch-invariant implementations of an operation, put last so that "auto" selects none.

    They are `{op}_xla_invariant` in the package's xla_invariant.py, and `{op}_mosaic_invariant` in
    its mosaic_invariant.py, each with its `..._unsupported`. The latter two take the name of the
    kernels, mosaic_gpu or mosaic_tpu, before the operation's arguments.
    """
    module, name, platforms = (
        f"{package}.xla_invariant",
        f"{op}_xla_invariant",
        ("cpu", "gpu", "tpu"),
    )
    implementations = {"xla_invariant": lazy_implementation(module, name, platforms, proven=False)}
    module, name = f"{package}.mosaic_invariant", f"{op}_mosaic_invariant"
    for chip in ("gpu", "tpu"):
        unbound = lazy_implementation(module, name, (chip,), proven=False)
        implementations[f"mosaic_{chip}_invariant"] = replace(
            unbound,
            run=functools.partial(unbound.run, f"mosaic_{chip}"),
            unsupported=functools.partial(unbound.unsupported, f"mosaic_{chip}"),
        )
    return implementations


def implementations_of(
    package: str,
    op: str,
    xla: Run,
    reference: Run,
    *,
    extra: Mapping[str, Implementation[Run]] = MappingProxyType({}),
    invariant_in: str = "",
) -> dict[str, Implementation[Run]]:
    """The implementations of an operation, in order of preference.

    They are the Pallas kernels of the package, `extra`, `xla` and `reference`, and the
    batch-invariant ones of the package `invariant_in`, if it is named.
    """
    return {
        **mosaic_implementations(package, op),
        **extra,
        "xla": Implementation(xla),
        "reference": Implementation(reference),
        **(invariant_implementations(invariant_in, op) if invariant_in else {}),
    }


def kernel_module(package: str, kernels: str) -> Any:
    """The package's module of Pallas kernels: pallas_gpu for mosaic_gpu, pallas_tpu for mosaic_tpu.

    It is imported by the first use, because the compilers of kernels take a second to import.
    """
    return importlib.import_module(f"{package}.{kernels.replace('mosaic', 'pallas')}")


def kernels_unsupported(package: str, op: str, kernels: str, *arrays: Any) -> str | None:
    """The reason why kernels cannot run an operation on these shapes, or None."""
    return getattr(kernel_module(package, kernels), f"{op}_{kernels}_unsupported")(*arrays)


class Target(NamedTuple):
    """The device for which the current code is traced."""

    platform: str  # cpu, gpu or tpu
    kind: str  # device_kind, the vendor's name

    @property
    def is_hopper(self) -> bool:
        """True for compute capability 9.0, the only one with wgmma instructions."""
        return any(name in self.kind for name in ("H100", "H200", "H800", "H20", "GH200"))


def target_device() -> Target:
    """The device of the current mesh, which this machine need not have; else this machine's."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is not None:
        return Target(device.platform, device.device_kind)
    return Target(jax.default_backend(), jax.devices()[0].device_kind)


def count_gpu_cores() -> int:
    """Streaming multiprocessors of the GPU that `target_device` names; 2 if it has none."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    count = device.num_cores if device else getattr(jax.devices()[0], "core_count", None)
    return count or 2


def select_implementation(
    impl: Impl, impls: Mapping[str, Implementation[Run]], *arrays: Any
) -> Run:
    """The function of the implementation to call; `impls` is in order of preference.

    "auto" selects the first proven implementation that supports the platform and these shapes. It
    logs once which one it selected, and why not those before it.
    A single name never falls back to another. Of several names the first that can run these shapes
    is selected, proven or not: the caller has checked them (`pallas_kernels.check`).
    Only shapes and dtypes of the arrays are read.
    Raises: ValueError for an unknown name; KernelUnsupported, with the reasons, if none of the
    names can run these shapes on this platform.
    """
    platform = target_device().platform
    if impl != "auto":
        names = (impl,) if isinstance(impl, str) else tuple(impl)
        unknown = next((name for name in names if name not in impls), None)
        if unknown is not None or not names:
            unknown_name = impl if unknown is None else unknown
            # A typing error only: "mosaic_b200" shares most of its letters with a kernel of TPUs.
            close_names = difflib.get_close_matches(str(unknown), [*impls, "auto"], 1, cutoff=0.75)
            hint = (
                f"Did you mean {close_names[0]!r}?"
                if close_names
                else f"Known: auto, {', '.join(impls)}."
            )
            raise ValueError(f"impl must name an implementation, got {unknown_name!r}. {hint}")
        reasons = {}
        for name in names:
            reasons[name] = _unsupported_reason(impls[name], platform, arrays)
            if reasons[name] is None:
                return impls[name].run
        listed = "; ".join(str(reason) for reason in reasons.values())
        raise KernelUnsupported(
            f"impl={impl!r} cannot run on this device: {listed}. Try impl='auto'.", listed
        )
    reasons = []
    for name, candidate in impls.items():
        reason = _unsupported_reason(candidate, platform, arrays)
        if reason is None and not candidate.proven:
            reason = f"interpreted and compiled, but never run on a chip; impl={name!r} tries it"
        if reason is None:
            suffix = f", since {'; '.join(reasons)}" if reasons else ""
            _log_once(f"{candidate.run.__module__} on {platform}{suffix}")
            return candidate.run
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"no implementation runs on {platform}: " + "; ".join(reasons))


def _unsupported_reason(
    candidate: Implementation[Any], platform: str, arrays: tuple[Any, ...]
) -> str | None:
    if platform not in candidate.platforms:
        return f"it needs {' or '.join(candidate.platforms)}, this is {platform}"
    return candidate.unsupported(*arrays)


@functools.lru_cache(maxsize=256)
def _log_once(message: str) -> None:
    _log.info(message)
