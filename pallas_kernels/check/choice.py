# SPDX-License-Identifier: Apache-2.0
"""Select each operation's implementation by the verdicts: once, at startup, as a value.

Next: pallas_kernels/dispatch.py, whose `select_implementation` takes the selected names.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.check import child, verdicts
from pallas_kernels.check.verdicts import KernelVerdict
from pallas_kernels.decode_attention import api as decoding
from pallas_kernels.dispatch import Impl
from pallas_kernels.grouped_matmul import api as matmul
from pallas_kernels.sink_attention import api as attention
from pallas_kernels.token_logprobs import api as logprobs

PLAIN = ("xla", "xla_invariant", "reference")  # run on every machine and need no check
PLATFORMS: dict[str, dict[str, tuple[str, ...]]] = {  # of each implementation, the preferred first
    operation: {name: impl.platforms for name, impl in impls.items()}
    for operation, impls in {
        "sink_attention": attention.IMPLS, "decode_attention": decoding.IMPLS,
        "grouped_swiglu": matmul.SWIGLU_IMPLS, "grouped_matmul": matmul.IMPLS,
        "token_logprobs": logprobs.IMPLS,
    }.items()
}  # fmt: skip
Judge = Callable[[str, str], KernelVerdict]  # (operation, implementation) -> its verdict


class Choice(NamedTuple):
    """The implementation that an operation runs."""

    impl: Impl  # the operation's argument
    rejected: tuple[tuple[str, KernelVerdict], ...] = ()  # preferred kernels, with their verdicts

    @property
    def name(self) -> str:
        return self.impl if isinstance(self.impl, str) else self.impl[0]


class KernelRefused(ValueError):
    """A kernel requested by name cannot be used; the message has the reason in one line."""


def requested_impls(name: str) -> dict[str, Impl]:
    """The named implementation for each operation that has it, and "auto" for the others."""
    return {operation: name if name in impls else "auto" for operation, impls in PLATFORMS.items()}


def invariant_impls(name: str) -> dict[str, Impl]:
    """The batch-invariant implementation of every operation that belongs to "auto" or `name`."""
    return dict.fromkeys(PLATFORMS, f"{'xla' if name == 'auto' else name}_invariant")


def choose_kernels(name: str, platform: str, judge: Judge) -> dict[str, Choice]:
    """For each operation the named implementation, else the first correct kernel, else XLA.

    `judge` is called for kernels of this platform only, and stops at the first correct one.
    Raises: KernelRefused when the named kernel is for another platform, wrong, or does not support
    the run's sizes.
    """
    choices = {}
    for operation, impls in PLATFORMS.items():
        if name in PLAIN:
            choices[operation] = Choice(name)
        elif name in impls:
            if platform not in impls[name]:
                needed = " or ".join(impls[name])
                raise KernelRefused(f"it needs a {needed}, but this machine has a {platform}")
            verdict = judge(operation, name)
            if not verdict.is_right:
                raise KernelRefused(f"{operation}: {describe_verdict(verdict)}")
            choices[operation] = Choice(name)
        else:
            choices[operation] = _first_right_kernel(operation, platform, judge)
    return choices


def _first_right_kernel(operation: str, platform: str, judge: Judge) -> Choice:
    rejected: list[tuple[str, KernelVerdict]] = []
    for name, platforms in PLATFORMS[operation].items():
        if name in PLAIN:
            return Choice(name, tuple(rejected))
        if platform in platforms:
            verdict = judge(operation, name)
            if verdict.is_right:  # XLA is the fallback for shapes that the kernel does not support
                return Choice((name, "xla"), tuple(rejected))
            rejected.append((name, verdict))
    raise AssertionError(f"{operation} must have {PLAIN[0]}")


def describe_verdict(verdict: KernelVerdict) -> str:
    """Describe a verdict that is not "right"."""
    prefixes = {
        "wrong": "failed in ", "refuses": "unsupported: ", "unknown": "could not be checked: ",
    }  # fmt: skip
    return prefixes[verdict.kind] + verdict.reason


def print_line(line: str) -> None:
    """Print a line and flush, so that it appears before a long check."""
    print(line, flush=True)


def make_judge(
    chip: Mapping[str, str], dtype: str, real: Mapping[str, Sequence[Mapping[str, Any]]], *,
    folder: Path | None = None, timeout_s: float = child.TIMEOUT_S, recheck: bool = False,
    log_line: Callable[[str], None] = print_line,
) -> Judge:  # fmt: skip
    """A judge that returns the stored verdict, or checks in a child process and stores the result.

    `real`: for each operation the fields of cases of the run's sizes. `recheck`: ignore stored
    verdicts.
    """
    folder = verdicts.verdict_folder() if folder is None else folder

    def judge(operation: str, impl: str) -> KernelVerdict:
        key = verdicts.verdict_key(chip, operation, impl, dtype, real.get(operation))
        verdict = None if recheck else verdicts.load_verdict(folder, key, log_line)
        if verdict is None:
            log_line(f"checking {operation} with {impl} on {chip['kind']}…")
            try:
                verdict = child.check_kernel(operation, impl, dtype, real.get(operation), timeout_s)
            except child.NoChip as error:  # not stored: the next run tries again
                return KernelVerdict("unknown", str(error))
            verdicts.save_verdict(folder, key, verdict, log_line)
        return verdict

    return judge


def may_have_accelerator(platforms: str | None = None) -> bool:
    """Return True if JAX may find a GPU or TPU, without opening it: a TPU admits one process."""
    platforms = getattr(jax.config, "jax_platforms", None) if platforms is None else platforms
    if platforms:  # JAX_PLATFORMS
        return platforms.split(",")[0] != "cpu"
    return bool(
        find_spec("libtpu") or find_spec("jax_plugins") or entry_points(group="jax_plugins")
    )
