# SPDX-License-Identifier: Apache-2.0
"""Select each operation's implementation by the verdicts: once, at startup, as a value.

Next: pallas_kernels/dispatch.py, whose `select_implementation` takes the selected names.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        "sink_attention": attention.IMPLS,
        "decode_attention": decoding.IMPLS,
        "grouped_swiglu": matmul.SWIGLU_IMPLS,
        "grouped_matmul": matmul.IMPLS,
        "token_logprobs": logprobs.IMPLS,
    }.items()
}
Judge = Callable[[str, str], KernelVerdict]  # (operation, implementation) -> its verdict
# Checks that run at once, each with cases of a run's sizes on the device. A TPU admits one process.
CHECKS_AT_ONCE = {"gpu": 4}


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

    `judge` is called for kernels of this platform only, and stops at the first correct one. One
    that checks in processes does the first kernels of all operations at once where it may.
    Raises: KernelRefused when the named kernel is for another platform, wrong, or does not support
    the run's sizes.
    """
    if isinstance(judge, ProcessJudge):
        judge.check_ahead(preferred_kernels(name, platform), CHECKS_AT_ONCE.get(platform, 1))
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


def preferred_kernels(name: str, platform: str) -> list[tuple[str, str]]:
    """(operation, implementation) that `choose_kernels` certainly asks for, if it refuses none."""
    pairs = []
    for operation, impls in PLATFORMS.items() if name not in PLAIN else ():
        candidates = [name] if name in impls else list(impls)
        first = next((x for x in candidates if x in PLAIN or platform in impls[x]), None)
        if first is None:
            return []  # the named kernel is for another platform, and is refused
        if first not in PLAIN:
            pairs.append((operation, first))
    return pairs


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
        "wrong": "failed in ",
        "refuses": "unsupported: ",
        "unknown": "could not be checked: ",
    }
    return prefixes[verdict.kind] + verdict.reason


def print_line(line: str) -> None:
    """Print a line and flush, so that it appears before a long check."""
    print(line, flush=True)


class ProcessJudge:
    """A judge that returns the stored verdict, or checks in a child process and stores the result.

    `real`: for each operation the fields of cases of the run's sizes. `recheck`: ignore stored
    verdicts.
    """

    def __init__(
        self,
        chip: Mapping[str, str],
        dtype: str,
        real: Mapping[str, Sequence[Mapping[str, Any]]],
        folder: Path,
        timeout_s: float,
        recheck: bool,
        log_line: Callable[[str], None],
    ) -> None:
        self.chip, self.dtype, self.real = chip, dtype, real
        self.folder, self.timeout_s, self.recheck = folder, timeout_s, recheck
        self.log_line = log_line
        self.ahead: dict[tuple[str, str], KernelVerdict] = {}

    def __call__(self, operation: str, impl: str) -> KernelVerdict:
        if (operation, impl) in self.ahead:
            return self.ahead[operation, impl]
        verdict = self._find_stored(operation, impl)
        if verdict is None:
            verdict = self._run_check(operation, impl)
            self._store(operation, impl, verdict)
        return verdict

    def check_ahead(self, pairs: Iterable[tuple[str, str]], n_at_once: int) -> None:
        """Judge these (operation, implementation), so many at once; later calls find the verdicts.

        A check that ended without a result beside others is repeated alone: they share the
        device's memory and the machine's cores.
        """
        if n_at_once < 2:
            return
        checks, stop = {}, threading.Event()
        with ThreadPoolExecutor(n_at_once, thread_name_prefix="check") as pool:
            try:
                for operation, impl in pairs:  # here and not in the threads: lines in order
                    stored = self._find_stored(operation, impl)
                    if stored is None:
                        check = pool.submit(self._run_check, operation, impl, stop)
                        checks[operation, impl] = check
                    else:
                        self.ahead[operation, impl] = stored
                verdicts_beside = {pair: check.result() for pair, check in checks.items()}
            except BaseException:  # the user's Ctrl-C ends the children too
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for (operation, impl), verdict in verdicts_beside.items():
            if len(checks) > 1 and (verdict.kind == "unknown" or child.may_be_of_machine(verdict)):
                self.log_line(f"checking {operation} with {impl} again, alone: {verdict.reason}")
                verdict = self._run_check(operation, impl)
            self._store(operation, impl, verdict)
            self.ahead[operation, impl] = verdict

    def _key(self, operation: str, impl: str) -> verdicts.Key:
        return verdicts.verdict_key(
            self.chip, operation, impl, self.dtype, self.real.get(operation)
        )

    def _find_stored(self, operation: str, impl: str) -> KernelVerdict | None:
        """The stored verdict; None, with a line that says so, if a check must run."""
        verdict = None
        if not self.recheck:
            key = self._key(operation, impl)
            verdict = verdicts.load_verdict(self.folder, key, self.log_line)
        if verdict is None:
            self.log_line(f"checking {operation} with {impl} on {self.chip['kind']}…")
        return verdict

    def _run_check(
        self, operation: str, impl: str, stop: threading.Event | None = None
    ) -> KernelVerdict:
        real = self.real.get(operation)
        try:
            return child.check_kernel(operation, impl, self.dtype, real, self.timeout_s, stop)
        except child.NoChip as error:
            return KernelVerdict("unknown", str(error))

    def _store(self, operation: str, impl: str, verdict: KernelVerdict) -> None:
        if verdict.kind != "unknown":  # then the next run tries again
            key = self._key(operation, impl)
            verdicts.save_verdict(self.folder, key, verdict, self.log_line)


def make_judge(
    chip: Mapping[str, str],
    dtype: str,
    real: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    folder: Path | None = None,
    timeout_s: float = child.TIMEOUT_S,
    recheck: bool = False,
    log_line: Callable[[str], None] = print_line,
) -> Judge:
    """A ProcessJudge with this command's defaults."""
    folder = verdicts.verdict_folder() if folder is None else folder
    return ProcessJudge(chip, dtype, real, folder, timeout_s, recheck, log_line)


def may_have_accelerator(platforms: str | None = None) -> bool:
    """Return True if JAX may find a GPU or TPU, without opening it: a TPU admits one process."""
    platforms = getattr(jax.config, "jax_platforms", None) if platforms is None else platforms
    if platforms:  # JAX_PLATFORMS
        return platforms.split(",")[0] != "cpu"
    return bool(
        find_spec("libtpu") or find_spec("jax_plugins") or entry_points(group="jax_plugins")
    )
