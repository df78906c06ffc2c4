# SPDX-License-Identifier: Apache-2.0
"""The compilers' own schedules of kernels, printed: `python -m benchmarks.kernels OP --compile
CHIP --schedule`.

    python -m benchmarks.kernels.schedule CHIP FOLDER MODULE:FUNCTION WORD ...

is its child process, because libtpu reads its flags once, before it loads. It compiles the list of
`Program` that FUNCTION(WORD, ...) returns, and writes the compiler's output to FOLDER. This works
for other kernels too: benchmarks/kernel_schedules.py has JAX's own.
Next: `schedule_tpu.py`, `schedule_hopper.py`, `loop_counts.py`.
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

from benchmarks.kernels import schedule_hopper
from pallas_kernels.ahead_of_time import TPUS, chip_mesh, compile_for
from pallas_kernels.bench import loop_counts, schedule_tpu
from pallas_kernels.bench.measure import first_line
from pallas_kernels.bench.ops import OPS, cases_by_name

MIN_CYCLES = 32  # of a printed loop: shorter loops wait for copies or move scalars
UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE")
IMPL = {**dict.fromkeys(TPUS, "mosaic_tpu"), "h100": "mosaic_gpu", "h200": "mosaic_gpu"}


class Program(NamedTuple):
    """A function to compile; counts() is called while the chip is the target."""

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    counts: Callable[[], dict[str, schedule_tpu.LoopCounts]] = dict


class CompilerOutput(NamedTuple):
    """The compiled kernels of all programs, and the loop counts by the kernels' names."""

    kernels: list[Any]  # TpuSchedule or HopperKernel
    counts: dict[str, schedule_tpu.LoopCounts]

    def find_counts(self, kernel: str) -> schedule_tpu.LoopCounts | None:
        """Find the loop counts of a kernel, whose name XLA extends, as by jvp_."""
        for name, counts in self.counts.items():
            if re.search(rf"(^|_){name}_*(\.\d+)?$", kernel):
                return counts
        return None


def schedule_refusal(chip: str, impl: str) -> str | None:
    """Return the error message if there is no schedule to print, or None."""
    if chip not in IMPL:
        return (
            f"--schedule needs a chip whose compiler writes one, {', '.join(IMPL)}; got "
            f"--compile {chip}. Type --compile {next(iter(IMPL))}."
        )
    if impl not in ("auto", IMPL[chip]):
        return (
            f"--schedule needs kernels whose compiler writes one, {IMPL[chip]} for "
            f"{chip}; got --impl {impl}. Type --impl {IMPL[chip]}."
        )
    return None


def make_programs(op: str, case: str, dtype: str) -> list[Program]:
    """Programs of an operation: the forward pass, and forward and backward in one."""
    op_spec = OPS[op]
    case_spec = cases_by_name(op_spec)[case]
    inputs = jax.eval_shape(lambda: op_spec.inputs(case_spec, dtype, 0))
    n = op_spec.differentiated

    def forward(*x: Any) -> Any:
        return op_spec.call(case_spec, f"mosaic_{_target_platform()}")(*x)

    def forward_backward(*x: Any) -> Any:
        out, pull = jax.vjp(lambda *d: forward(*d, *x[n:]), *x[:n])
        return out, pull(jax.tree.map(jnp.ones_like, out))

    count = (lambda: loop_counts.count_loops(op, case_spec)) if dtype == "bfloat16" else dict
    return [Program(fn, inputs, count) for fn in ((forward, forward_backward) if n else (forward,))]


def _target_platform() -> str:
    from pallas_kernels.dispatch import target_device

    return target_device().platform


def compile_in_child(chip: str, target: str, *words: str) -> CompilerOutput:
    """Compile in a child process and read the compiler's output.

    Raises: RuntimeError with the first line of the compiler's error; ValueError when its output
    cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {schedule_tpu.FLAGS.format(folder)}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags.strip()}
        command = [
            sys.executable,
            "-m",
            "benchmarks.kernels.schedule",
            chip,
            folder,
            target,
            *words,
        ]
        process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        output = Path(folder, "said.json")
        if not output.exists():
            lines = [x for x in process.stderr.splitlines() if x.strip()]
            raise RuntimeError(
                lines[-1] if lines else f"the compiler ended with {process.returncode}"
            )
        result = json.loads(output.read_text())
        if "refused" in result:
            raise RuntimeError(result["refused"])
        read_kernels = (
            schedule_tpu.read_tpu_schedules if chip in TPUS else schedule_hopper.read_hopper_kernels
        )
        return CompilerOutput(
            read_kernels(Path(folder)),
            {k: _counts_from_json(x) for k, x in result["counts"].items()},
        )


def _counts_from_json(x: Any) -> schedule_tpu.LoopCounts:
    gaps, inner = x
    return schedule_tpu.LoopCounts(
        tuple(tuple(y) if isinstance(y, list) else y for y in gaps),
        tuple(map(_counts_from_json, inner)),
    )


def format_kernels(chip: str, case: str, output: CompilerOutput) -> Iterator[str]:
    """Yield the lines of each kernel; repetitions of the same kernel are left out."""
    printed = set()
    for kernel in output.kernels:
        key = kernel.rows if chip in TPUS else kernel.loops
        if key in printed:
            continue
        printed.add(key)
        if chip in TPUS:
            yield from _format_tpu_kernel(chip, case, kernel, output.find_counts(kernel.kernel))
        else:
            yield from schedule_hopper.format_hopper_kernel(case, kernel)


def _format_tpu_kernel(
    chip: str, case: str, kernel: schedule_tpu.TpuSchedule, counted: schedule_tpu.LoopCounts | None
) -> Iterator[str]:
    ms = kernel.ms(counted, chip)
    time = "" if ms is None else f", {ms:.2f} ms (DMA not included)"
    yield f"{case}  {kernel.kernel}: {len(kernel.rows)} bundles{time}"
    heads = "".join(f"{x:>8}" for x in (*UNITS, "fills", "spills"))
    yield f"  {'loop':<14}{'cycles':>8}{heads}"
    for loop, depth in schedule_tpu.walk_loops(kernel.body):
        cycles = kernel.cycles(loop)
        if cycles < MIN_CYCLES:
            continue
        shares = "".join(f"{kernel.share(loop, u):>8.0%}" for u in UNITS)
        moved = "".join(f"{kernel.slots(loop, u):>8}" for u in ("VLOAD:FILL", "VSTORE:SPILL"))
        name = f"{'>' * depth} {loop.first:#x}" if depth else "once"
        yield f"  {name:<14}{cycles:>8}{shares}{moved}"


def format_schedules(op: str, dtype: str, chip: str, chosen: tuple[Any, ...]) -> Iterator[str]:
    """Yield the lines of all cases, each as soon as it is ready; refused cases have the reason."""
    clock = f", {schedule_tpu.GHZ[chip]} GHz" if chip in TPUS else ""
    units = (
        "cycles of one iteration of each loop without inner loops, shares of slots, registers "
        "filled and spilled"
        if chip in TPUS
        else "cycles of one iteration of each main loop on each pipe of a quarter core"
    )
    yield f"{op} on {chip}{clock}, {dtype}, jax {jax.__version__}: {units}"

    def format_case(case: Any) -> list[str]:
        try:
            output = compile_in_child(
                chip, "benchmarks.kernels.schedule:make_programs", op, case.name, dtype
            )
        except (RuntimeError, ValueError) as error:
            return [f"{case.name}  refused: {first_line(error)}"]
        text = list(format_kernels(chip, case.name, output))
        return text or [f"{case.name}  refused: the compiler left no schedule of a Pallas kernel"]

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # of processes that compile
        for lines in pool.map(format_case, chosen):
            yield from lines


def _run_child(chip: str, folder: str, target: str, *words: str) -> None:
    module, _, function = target.partition(":")
    result: dict[str, Any] = {"counts": {}}
    try:
        for i, program in enumerate(getattr(importlib.import_module(module), function)(*words)):
            dump = Path(folder, str(i))
            dump.mkdir()
            compile_for(chip, lambda *x, fn=program.fn: fn(*x), *program.inputs, dump=dump)
            with jax.set_mesh(chip_mesh(chip)):
                result["counts"] |= program.counts()
    except Exception as error:  # tracing, lowering or the compiler may raise anything
        result = {"refused": first_line(error)}
    Path(folder, "said.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _run_child(*sys.argv[1:])
