# SPDX-License-Identifier: Apache-2.0
"""The stage that runs the kernels' cases on the device: those of test_on_chip.py, by value.

    python -m benchmarks.on_device.cases --group invariant
    python -m benchmarks.on_device.cases --group real --done results.jsonl --workers 6
    python -m benchmarks.on_device.cases --platform cpu

Each verdict is reported at once, so that a stage that is killed loses only what it is running. A
case is compiled while others have the device, and runs beside those that share it; one for which
there is no memory is repeated with the device alone. A worker process that dies, or whose case
raised an error, which may leave its device unusable, is replaced. `--platform cpu` is a rehearsal.
Exit status: 0 every case is right or refused; 1 otherwise.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks.on_device.stage import MARK, device_alone, device_shared, report
from pallas_kernels.bench.measure import first_line
from pallas_kernels.bench.ops import OPS
from pallas_kernels.check import one
from pallas_kernels.check.child import child_environ
from tests.pallas_kernels import test_on_chip

GROUPS = ("invariant", "real", "rest", "triton", "right")
OTHER_ROWS = "other_rows"
REHEARSAL = (
    "decode_attention-ring-xla",
    "grouped_matmul-rows_past_the_sum-xla",
    "token_logprobs-few_tokens-xla",
)
ROOT = Path(__file__).parents[2]

# Right on an H100, docs/results/kernels.md: done again only as the last group. Where that table
# does not say which of several cases were right, none is listed.
RIGHT = {
    *(f"sink_attention-full_20b-{impl}" for impl in ("mosaic_gpu", "mosaic_gpu_invariant")),
    *(
        f"decode_attention-{case}-mosaic_gpu"
        for case in (
            "uneven",
            "ring",
            "several_new",
            "window_left",
            "packed_none",
            "odd_length",
            "64x8k",
            "64x8k_window",
        )
    ),
    *(
        f"grouped_matmul-{case}-{impl}"
        for case in ("uneven", "gate_up_20b")
        for impl in ("mosaic_gpu", "mosaic_gpu_invariant")
    ),
    "grouped_swiglu-uneven-mosaic_gpu",
    "grouped_swiglu-gate_up_20b-mosaic_gpu",
    *(
        f"grouped_{product}_{kind}-{case}-mosaic_gpu"
        for kind in ("mxfp4", "rounded")
        for product, case in (
            ("matmul", "uneven"),
            ("swiglu", "uneven"),
            ("matmul", "down_20b"),
            ("swiglu", "gate_up_20b"),
        )
    ),
    *(f"grouped_{product}_rounded-uneven-mosaic_gpu_invariant" for product in ("matmul", "swiglu")),
    "grouped_swiglu_rounded-gate_up_20b-mosaic_gpu_invariant",
    "grouped_swiglu_rounded-gate_up_120b-mosaic_gpu",
    *(f"grouped_{product}_low_rank-uneven-mosaic_gpu" for product in ("matmul", "swiglu")),
    "grouped_swiglu_low_rank-gate_up_20b-mosaic_gpu",
    *(
        f"token_logprobs-{case}-{impl}"
        for case in ("padded_head", "few_tokens")
        for impl in ("mosaic_gpu", "mosaic_gpu_invariant")
    ),
    "token_logprobs-gptoss20b_8k-mosaic_gpu",
}


class Case(NamedTuple):
    """A case by its name: what it runs, and how long that is expected to take."""

    group: str
    size: int  # 0 small, 1 a real case, 2 a long one
    run: Callable[[Any], str | None]  # takes the context of the device; returns the fault


def list_cases(platform: str = "gpu") -> dict[str, Case]:
    """Every case of the platform by name; on a CPU those of the rehearsal."""
    cases = {}
    for param in test_on_chip.calls():
        values: Any = param.values
        name, (operation, case, impl) = str(param.id), values
        if platform == "cpu":
            is_wanted = name in REHEARSAL
        else:
            is_wanted = any(mark.name == "gpu" for mark in _marks(param))
        if is_wanted:
            shapes = OPS[operation].cases
            size = 2 * (case in shapes.LONG_CASES) or int(case in shapes.REAL_CASES)
            cases[name] = Case(_group(name, impl, size), size, _compare(operation, case, impl))
    if platform == "cpu":
        return cases
    cases[OTHER_ROWS] = Case(
        "invariant",
        0,
        _call(test_on_chip.test_a_rows_bits_ignore_the_other_rows, "mosaic_gpu_invariant"),
    )
    return cases


def _marks(param: Any) -> Sequence[Any]:
    return param.marks if isinstance(param.marks, tuple | list) else (param.marks,)


def _group(name: str, impl: str, size: int) -> str:
    if name in RIGHT:
        return "right"
    if impl == "triton":
        return "triton"
    if impl.endswith("invariant"):
        return "invariant"
    return "real" if size else "rest"


def _compare(operation: str, case: Any, impl: str) -> Callable[[Any], str | None]:
    def run(hold_device: Any) -> str | None:
        op, dtype = OPS[operation], jnp.float32 if impl == "xla" else jnp.bfloat16
        shapes = jax.eval_shape(lambda: op.inputs(case, dtype, 0))
        test_on_chip.ready(impl, op.call(case, impl), shapes)
        repeats = 2 if impl == "xla" else 10
        return one.find_fault(op, case, impl, dtype, repeats, hold_device)

    return run


def _call(test: Callable[..., None], *args: Any) -> Callable[[Any], str | None]:
    def run(hold_device: Any) -> str | None:
        assert jax.default_backend() == "gpu", "JAX_PLATFORMS must name a GPU"
        with hold_device():
            try:
                test(*args)
            except AssertionError as error:
                return first_line(error)
        return None

    return run


def order_group(cases: dict[str, Case], group: str, done: set[str]) -> list[str]:
    """Names of a group's cases that are not done: the whole batch first, then real, small, long."""
    names = [name for name, case in cases.items() if case.group == group and name not in done]
    return sorted(names, key=lambda name: (name != OTHER_ROWS, (1, 0, 2)[cases[name].size]))


def read_done(paths: Sequence[Path]) -> set[str]:
    """Names of the cases that a campaign's results have as right; none without such files."""
    done = set()
    for line in (x for path in paths if path.exists() for x in path.read_text().splitlines()):
        try:
            figures = json.loads(line).get("figures", [])
        except ValueError:  # the last line of a campaign that was killed
            continue
        done |= {x["case"] for x in figures if x.get("verdict") == "right" and "case" in x}
    return done


def judge_case(case: Case) -> tuple[str, str]:
    """Run a case here; its verdict and the reason."""
    verdict = "error", ""
    for hold_device in (device_shared, device_alone):
        try:
            fault = case.run(hold_device)
            return ("wrong", fault) if fault else ("right", "")
        except (NotImplementedError, ImportError, pytest.skip.Exception) as error:
            return "refused", first_line(error)
        except Exception as error:  # tracing, the compiler or the device may raise anything
            verdict = "error", f"{type(error).__name__}: {first_line(error)}"
            if not one.is_out_of_memory(error):
                return verdict
    return ("refused", f"it needs more memory: {verdict[1]}") if case.size == 2 else verdict


def work(platform: str) -> None:
    """Run the cases whose names come in, one a line, and report each."""
    cases = list_cases(platform)
    for name in map(str.strip, sys.stdin):
        start = time.monotonic()
        verdict, message = judge_case(cases[name])
        report(
            case=name,
            verdict=verdict,
            message=message[:500],
            seconds=round(time.monotonic() - start, 1),
        )


def run_cases(names: list[str], platform: str, n_workers: int) -> dict[str, int]:
    """Run the cases in worker processes and report each; the number of each verdict."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    counts = {"right": 0, "wrong": 0, "refused": 0, "error": 0}
    printing = threading.Lock()

    def feed() -> None:
        worker = None
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or _start_worker(platform)
            figures = _run_case(worker, name)
            with printing:
                report(**figures)
                counts[figures["verdict"]] += 1
            if figures["verdict"] == "error":
                _end_worker(worker)
                worker = None
        if worker:
            _end_worker(worker)

    threads = [threading.Thread(target=feed) for _ in range(min(n_workers, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def _start_worker(platform: str) -> subprocess.Popen[str]:
    # Memory goes back to the device after each case, and does not wait in a worker for the next.
    settings = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"} if platform == "gpu" else {}
    settings["JAX_PLATFORMS"] = "cuda" if platform == "gpu" else platform
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.on_device.cases", "--worker", "--platform", platform],
        cwd=ROOT,
        env={**child_environ(os.environ), **settings},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _run_case(worker: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """What the worker reports of the case; how it ended if it says nothing."""
    assert worker.stdin and worker.stdout
    start = time.monotonic()
    try:
        worker.stdin.write(f"{name}\n")
        worker.stdin.flush()
    except BrokenPipeError:
        pass
    for line in worker.stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
        print(line, end="", flush=True)
    message = f"the process ended with status {worker.wait()}"
    seconds = round(time.monotonic() - start, 1)
    return {"case": name, "verdict": "error", "message": message, "seconds": seconds}


def _end_worker(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin and worker.stdout
    try:
        worker.stdin.close()
        worker.wait(10)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        worker.kill()
    worker.stdout.close()
    worker.wait()


def main(argv: list[str] | None = None) -> int:
    """Run the stage; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_device.cases")
    parser.add_argument("--group", choices=GROUPS, help="needed on a GPU")
    earlier = os.environ.get("ON_DEVICE_RESULTS", "").split(os.pathsep)
    parser.add_argument(
        "--done",
        type=Path,
        metavar="FILE",
        action="append",
        default=[Path(x) for x in earlier if x],
        help="a campaign's results.jsonl, may be repeated",
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--worker", action="store_true", help="of the stage's own processes")
    args = parser.parse_args(argv)
    if args.worker:
        work(args.platform)
        return 0
    if args.platform == "gpu" and not args.group:
        parser.error(f"--group must be one of {', '.join(GROUPS)}. Type --group {GROUPS[0]}.")
    cases, done = list_cases(args.platform), read_done(args.done)
    names = (
        order_group(cases, args.group, done)
        if args.platform == "gpu"
        else [name for name in cases if name not in done]
    )
    counts = run_cases(names, args.platform, args.workers)
    report(group=args.group or "rehearsal", cases=len(names), **counts)
    return int(counts["wrong"] + counts["error"] > 0)


if __name__ == "__main__":
    if "--worker" not in sys.argv:  # the device is for the workers
        jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
