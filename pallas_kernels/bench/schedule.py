# SPDX-License-Identifier: Apache-2.0
"""The compilers' own schedules of kernels, printed: `python -m pallas_kernels.bench OP --compile
CHIP --schedule`.

    python -m pallas_kernels.bench.schedule CHIP FOLDER MODULE:FUNCTION WORD ...

is its child: libtpu reads its flags once, before it loads. It compiles what FUNCTION(WORD, ...)
makes, a list of `Program`, and leaves in FOLDER what the compiler says. Anybody's kernels can be
looked at so: tests/bench/kernel_schedules.py has JAX's own.
Next: `schedule_tpu.py`, `schedule_hopper.py`, `turns.py`.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ahead_of_time import TPUS, chip_mesh, compile_for
from pallas_kernels.bench import schedule_hopper, schedule_tpu, turns
from pallas_kernels.bench.measure import first_line
from pallas_kernels.bench.ops import OPS, known

LEAST = 32  # cycles of a turn: shorter loops wait for copies or move scalars
UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE")
IMPL = {**dict.fromkeys(TPUS, "mosaic_tpu"), "h100": "mosaic_gpu", "h200": "mosaic_gpu"}


class Program(NamedTuple):
    """Something to compile. turns() is called while the chip is the target: see `turns.py`."""

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    turns: Callable[[], dict[str, schedule_tpu.Turns]] = dict


class Found(NamedTuple):
    """What the compiler left of all programs, and the turns of loops by kernels' names."""

    kernels: list[Any]  # TpuSchedule or HopperKernel
    turns: dict[str, schedule_tpu.Turns]

    def turns_of(self, kernel: str) -> schedule_tpu.Turns | None:
        """By the name within the kernel's: XLA puts around it what it was differentiated by."""
        for name, found in self.turns.items():
            if re.search(rf"(^|_){name}_*(\.\d+)?$", kernel):
                return found
        return None


def refusal(chip: str, impl: str) -> str | None:
    """Why there is no schedule to print; None where there is one."""
    if chip not in IMPL:
        return (f"--schedule must be of a chip whose compiler leaves one, {', '.join(IMPL)}; got "
                f"--compile {chip}. Type --compile {next(iter(IMPL))}.")  # fmt: skip
    if impl not in ("auto", IMPL[chip]):
        return (f"--schedule must be of kernels whose compiler leaves one, {IMPL[chip]} for "
                f"{chip}; got --impl {impl}. Type --impl {IMPL[chip]}.")  # fmt: skip
    return None


def programs(op: str, case: str, dtype: str) -> list[Program]:
    """Of one of our operations: the forward pass, and both in one program."""
    of = OPS[op]
    found = known(of)[case]
    inputs = jax.eval_shape(lambda: of.inputs(found, dtype, 0))
    n = of.differentiated

    def forward(*x: Any) -> Any:
        return of.call(found, f"mosaic_{_platform()}")(*x)

    def both(*x: Any) -> Any:
        out, pull = jax.vjp(lambda *d: forward(*d, *x[n:]), *x[:n])
        return out, pull(jax.tree.map(jnp.ones_like, out))

    count = (lambda: turns.of(op, found)) if dtype == "bfloat16" else dict
    return [Program(fn, inputs, count) for fn in ((forward, both) if n else (forward,))]


def _platform() -> str:
    from pallas_kernels.dispatch import target_device

    return target_device().platform


def compiled(chip: str, target: str, *words: str) -> Found:
    """Compile in a process of its own and read what the compiler left.

    Raises: RuntimeError with the first line of what the compiler refused; ValueError where what it
    left cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {schedule_tpu.FLAGS.format(folder)}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags.strip()}
        command = [
            sys.executable,
            "-m",
            "pallas_kernels.bench.schedule",
            chip,
            folder,
            target,
            *words,
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        said = Path(folder, "said.json")
        if not said.exists():
            lines = [x for x in done.stderr.splitlines() if x.strip()]
            raise RuntimeError(lines[-1] if lines else f"the compiler ended with {done.returncode}")
        told = json.loads(said.read_text())
        if "refused" in told:
            raise RuntimeError(told["refused"])
        read = schedule_tpu.read if chip in TPUS else schedule_hopper.read
        return Found(read(Path(folder)), {k: _turns(x) for k, x in told["turns"].items()})


def _turns(x: Any) -> schedule_tpu.Turns:
    gaps, inner = x
    return schedule_tpu.Turns(
        tuple(tuple(y) if isinstance(y, list) else y for y in gaps), tuple(map(_turns, inner))
    )


def show(chip: str, case: str, found: Found) -> Iterator[str]:
    """Lines of each kernel; one that is the same as an earlier one is left out."""
    seen = set()
    for kernel in found.kernels:
        key = kernel.rows if chip in TPUS else kernel.loops
        if key in seen:
            continue
        seen.add(key)
        if chip in TPUS:
            yield from _show_tpu(chip, case, kernel, found.turns_of(kernel.kernel))
        else:
            yield from schedule_hopper.show(case, kernel)


def _show_tpu(
    chip: str, case: str, kernel: schedule_tpu.TpuSchedule, counted: schedule_tpu.Turns | None
) -> Iterator[str]:
    ms = kernel.ms(counted, chip)
    time = "" if ms is None else f", {ms:.2f} ms (DMA not included)"
    yield f"{case}  {kernel.kernel}: {len(kernel.rows)} bundles{time}"
    heads = "".join(f"{x:>8}" for x in (*UNITS, "fills", "spills"))
    yield f"  {'loop':<14}{'cycles':>8}{heads}"
    for loop, depth in schedule_tpu.walk(kernel.body):
        cycles = kernel.cycles(loop)
        if cycles < LEAST:
            continue
        shares = "".join(f"{kernel.share(loop, u):>8.0%}" for u in UNITS)
        moved = "".join(f"{kernel.slots(loop, u):>8}" for u in ("VLOAD:FILL", "VSTORE:SPILL"))
        name = f"{'>' * depth} {loop.first:#x}" if depth else "once"
        yield f"  {name:<14}{cycles:>8}{shares}{moved}"


def tables(op: str, dtype: str, chip: str, chosen: tuple[Any, ...]) -> Iterator[str]:
    """Lines for the cases in turn, each as soon as it is known; what is refused says why."""
    clock = f", {schedule_tpu.GHZ[chip]} GHz" if chip in TPUS else ""
    what = (
        "cycles of one turn of each loop without those within, shares of slots, registers filled "
        "and spilled" if chip in TPUS else
        "cycles that one turn of each main loop keeps each pipe of a quarter core"
    )  # fmt: skip
    yield f"{op} on {chip}{clock}, {dtype}, jax {jax.__version__}: {what}"

    def lines(case: Any) -> list[str]:
        try:
            found = compiled(chip, "pallas_kernels.bench.schedule:programs", op, case.name, dtype)
        except (RuntimeError, ValueError) as error:
            return [f"{case.name}  refused: {first_line(error)}"]
        left = list(show(chip, case.name, found))
        return left or [f"{case.name}  refused: the compiler left no schedule of a Pallas kernel"]

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # of processes that compile
        for several in pool.map(lines, chosen):
            yield from several


def _child(chip: str, folder: str, target: str, *words: str) -> None:
    module, _, function = target.partition(":")
    told: dict[str, Any] = {"turns": {}}
    try:
        for i, program in enumerate(getattr(importlib.import_module(module), function)(*words)):
            dump = Path(folder, str(i))
            dump.mkdir()
            compile_for(chip, lambda *x, fn=program.fn: fn(*x), *program.inputs, dump=dump)
            with jax.set_mesh(chip_mesh(chip)):
                told["turns"] |= program.turns()
    except Exception as error:  # whatever tracing, lowering or the compiler refuses
        told = {"refused": first_line(error)}
    Path(folder, "said.json").write_text(json.dumps(told))


if __name__ == "__main__":
    _child(*sys.argv[1:])
