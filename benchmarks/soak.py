# SPDX-License-Identifier: Apache-2.0
"""A long run of groups in one process, in which nothing may grow.

COMMAND  python -m benchmarks.soak [--steps 2000] [--sync recompute] [--out runs/soak]

The model and the episodes of kills.py, with quick replies. Every 50 steps after the first 200 it
measures resident memory, open files, threads, files of the run folder, live arrays of JAX, entries
of caches without a limit, and objects that Python's collector knows. The trainer waits meanwhile,
so that the engine fills the queue and stops. A line is fitted to each, and the exit status is 1 if
one grows more than its bound, by two standard errors. The bounds are a file or an array that stays
of each second checkpoint, an object of each other step, or the tokens of each answer; besides 50
objects of each checkpoint, since tensorstore 0.1.86 keeps the metrics that Orbax reads. Linux.
"""

import argparse
import functools
import gc
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.kills import CONFIG, SETTINGS
from jaxmoe import train
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.run.parts import make_parts

WARM_UP, EVERY = 200, 50
LOOKS, LOOK_S = 8, 0.4
# growth a step
BOUNDS = {
    "resident_bytes": 2048.0,
    "open_files": 0.01,
    "threads": 0.01,
    "folder_files": 0.01,
    "live_arrays": 0.01,
    "live_array_bytes": 10.0,
    "cache_entries": 0.01,
    "objects": 0.5 + 50 / EVERY,
}


def cache_sizes() -> dict[str, int]:
    """Entries of the caches without a limit that modules and their classes have, by function."""
    # gc.get_objects() would also return tuples that another thread has half built, which then
    # fails there.
    sizes = dict[str, int]()
    for module in list(sys.modules.values()):
        members = list(getattr(module, "__dict__", {}).values())
        for member in [*members, *(x for c in members if isinstance(c, type) for x in list_own(c))]:
            if type(member) is not functools._lru_cache_wrapper:
                continue
            if member.cache_parameters()["maxsize"] is None and hasattr(member, "__qualname__"):
                name = f"{member.__module__}.{member.__qualname__}"
                sizes[name] = member.cache_info().currsize
    return sizes


def list_own(cls: type) -> list[Any]:
    """What a class itself defines, static and class methods as functions."""
    # By type: any attribute of an object that imports a module on demand would import it.
    wrappers = staticmethod, classmethod
    return [x.__func__ if type(x) in wrappers else x for x in list(vars(cls).values())]


def count_objects() -> int:
    """Number of objects that the collector knows, without a reference to one of them."""
    gc.freeze()
    count = gc.get_freeze_count()
    gc.unfreeze()
    return count


def measure(work: Path) -> dict[str, int]:
    """What this process has now."""
    gc.collect()
    arrays = jax.live_arrays()
    return {
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "folder_files": sum(1 for _ in work.rglob("*")),
        "live_arrays": len(arrays),
        "live_array_bytes": sum(array.nbytes for array in arrays),
        "cache_entries": sum(cache_sizes().values()),
        "objects": count_objects(),
    }


def measure_at_rest(work: Path) -> dict[str, int]:
    """The least of several measurements, while the engine comes to its end."""
    looks = []
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        looks.append(measure(work))
    return {name: min(look[name] for look in looks) for name in looks[0]}


def fit_slope(steps: Sequence[int], values: Sequence[int]) -> tuple[float, float]:
    """The growth a step by least squares, and its standard error."""
    x = np.array(steps, np.float64) - np.mean(steps)
    y = np.array(values, np.float64) - np.mean(values)
    slope = float(x @ y / (x @ x))
    rest = y - slope * x
    return slope, float(np.sqrt(rest @ rest / (len(x) - 2) / (x @ x)))


def find_growth(samples: Mapping[int, Mapping[str, int]]) -> list[str]:
    """Print the slope of each quantity; return those that grow. `samples`: by step."""
    growing = list[str]()
    for name, bound in BOUNDS.items():
        slope, error = fit_slope(list(samples), [sample[name] for sample in samples.values()])
        growing += [name] * (slope - 2 * error > bound)
        print(f"{name:17} {slope:+10.4f} a step, error {error:.4f}, bound {bound:g}", flush=True)
    return growing


def run(cfg: Config) -> dict[int, dict[str, int]]:
    """Train; return the measurements by step."""
    parts, samples, counts = make_parts(cfg), dict[int, dict[str, int]](), iter(range(1, 10**9))

    def make_batch(*args: Any) -> Any:
        step = next(counts)
        if step >= WARM_UP and step % EVERY == 0:
            samples[step] = measure_at_rest(Path(cfg.workdir))
            print(f"{step} {samples[step]}", flush=True)
        return parts.make_batch(*args)

    train.train(cfg, replace(parts, make_batch=make_batch))
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sync", default="recompute")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    args = parser.parse_args(argv)
    keep_freed_memory()
    shutil.rmtree(args.out, ignore_errors=True)
    changes = (
        f"steps={args.steps}",
        "model.d_model=16",
        "rollout.sequences_per_step=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_parallel_sequences=8",
        f"save.every_steps={EVERY}",
        "eval.every_steps=1000000",  # its first call compiles
        "data.environment=benchmarks.late_replies:LateReplies(slow_s=0.02)",
        f"rollout.native.on_weight_sync={args.sync}",
    )
    cfg = override(load_config(CONFIG), *SETTINGS, *changes)
    samples = run(replace(cfg, workdir=str(args.out)))
    growing = find_growth(samples)
    print(json.dumps({"steps": args.steps, "sync": args.sync, "grows": growing}))
    return int(bool(growing))


if __name__ == "__main__":
    sys.exit(main())
