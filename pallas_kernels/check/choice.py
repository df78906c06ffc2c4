# SPDX-License-Identifier: Apache-2.0
"""From verdicts to what each operation runs: decided once, at the edge, and passed on as a value.

Next: pallas_kernels/dispatch.py, whose `pick` takes what is chosen here.
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

PLAIN = ("xla", "reference")  # for every machine; they need no check
PLATFORMS: dict[str, dict[str, tuple[str, ...]]] = {  # of each implementation, the best first
    operation: {name: impl.platforms for name, impl in impls.items()}
    for operation, impls in {
        "sink_attention": attention.IMPLS, "decode_attention": decoding.IMPLS,
        "grouped_swiglu": matmul.SWIGLU_IMPLS, "grouped_matmul": matmul.IMPLS,
        "token_logprobs": logprobs.IMPLS,
    }.items()
}  # fmt: skip
Judge = Callable[[str, str], KernelVerdict]  # of an operation in an implementation


class Choice(NamedTuple):
    """What an operation runs."""

    impl: Impl  # as the operation takes it
    passed: tuple[tuple[str, KernelVerdict], ...] = ()  # preferred ones, and why they are not taken

    @property
    def name(self) -> str:
        return self.impl if isinstance(self.impl, str) else self.impl[0]


class Refused(ValueError):
    """An implementation that was asked for by name cannot be had: one line, why."""


def wanted(name: str) -> dict[str, Impl]:
    """By operation, what a name asks for where nothing is checked: "auto" where it has none."""
    return {operation: name if name in impls else "auto" for operation, impls in PLATFORMS.items()}


def choose(name: str, platform: str, judge: Judge) -> dict[str, Choice]:
    """By operation: what is asked for by name, else the first right kernel, then XLA.

    `judge` is asked of kernels of this platform only, and of no more than are needed.
    Raises Refused where the named one is of another platform, wrong, or cannot take the run's size.
    """
    found = {}
    for operation, impls in PLATFORMS.items():
        if name in PLAIN:
            found[operation] = Choice(name)
        elif name in impls:
            if platform not in impls[name]:
                raise Refused(f"it needs {' or '.join(impls[name])}, this is {platform}")
            verdict = judge(operation, name)
            if not verdict.right:
                raise Refused(f"{operation}: {said(verdict)}")
            found[operation] = Choice(name)
        else:
            found[operation] = _first(operation, platform, judge)
    return found


def _first(operation: str, platform: str, judge: Judge) -> Choice:
    passed: list[tuple[str, KernelVerdict]] = []
    for name, platforms in PLATFORMS[operation].items():
        if name in PLAIN:
            return Choice(name, tuple(passed))
        if platform in platforms:
            verdict = judge(operation, name)
            if verdict.right:  # for other shapes than the run's, the next best
                return Choice((name, "xla"), tuple(passed))
            passed.append((name, verdict))
    raise AssertionError(f"{operation} must have {PLAIN[0]}")


def said(verdict: KernelVerdict) -> str:
    """In words."""
    how = {"wrong": "it is wrong ", "refuses": "it refuses: ", "unknown": "it cannot be checked: "}
    return how[verdict.kind] + verdict.reason


def told(line: str) -> None:
    """On the terminal, at once."""
    print(line, flush=True)


def judge_here(
    chip: Mapping[str, str], dtype: str, real: Mapping[str, Sequence[Mapping[str, Any]]], *,
    where: Path | None = None, timeout_s: float = child.TIMEOUT_S, again: bool = False,
    tell: Callable[[str], None] = told,
) -> Judge:  # fmt: skip
    """A judge that takes the verdict on file, or else checks in a process of its own and keeps it.

    `real`: by operation, the fields of cases of the run's sizes. `again`: files are not read.
    """
    where = verdicts.folder() if where is None else where

    def judge(operation: str, impl: str) -> KernelVerdict:
        of = verdicts.key(chip, operation, impl, dtype, real.get(operation))
        verdict = None if again else verdicts.kept(where, of, tell)
        if verdict is None:
            tell(f"checking {operation} in {impl} on {chip['kind']}…")
            try:
                verdict = child.checked(operation, impl, dtype, real.get(operation), timeout_s)
            except child.NoChip as error:  # not kept: the next run may have better luck
                return KernelVerdict("unknown", str(error))
            verdicts.keep(where, of, verdict, tell)
        return verdict

    return judge


def may_have_a_chip(named: str | None = None) -> bool:
    """Whether anything but a CPU can be here, without opening a device: a TPU is one process's."""
    named = getattr(jax.config, "jax_platforms", None) if named is None else named
    if named:  # JAX_PLATFORMS
        return named.split(",")[0] != "cpu"
    return bool(
        find_spec("libtpu") or find_spec("jax_plugins") or entry_points(group="jax_plugins")
    )
