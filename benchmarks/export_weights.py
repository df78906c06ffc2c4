# SPDX-License-Identifier: Apache-2.0
"""Weight files: GB/s of a weight update against plain copies of the same bytes, in turn.

    python benchmarks/export_weights.py [--rounds 5] [--gigabytes 2] [--directory /dev/shm]

A synthetic GPT-OSS of the 20B's proportions (transposed attention and head, interleaved gate and
up), held by jax in float32 or bfloat16. `convert` is the export without the file: what a transport
without files costs. Yardsticks, on one core: numpy's copy into memory that is warm, the same into
fresh memory, and a plain write of the same bytes to a fresh file in that directory. `export` is
the first update of a run, into fresh pages; `export_over` every later one, into the pages of
the last but one. In brackets: the speed of export_over over theirs; per CPU-second too, for
machines that are busy. Also the growth of resident memory beyond params and file. The last line
is JSON.
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import abstract_params, count_params
from jaxmoe.weight_sync.files import write_files
from jaxmoe.weight_sync.update import empty_manifest, fill_digests, plan_tensors

BLOCK_BYTES = 1 << 28


def model(gigabytes: float, held: str) -> ModelConfig:
    """Two layers of the 20B, so narrow that they have that many bytes, and words in proportion."""
    wanted = gigabytes * 1e9 / jnp.dtype(held).itemsize
    d = round((wanted / (2 * 32 * 3 * 1.1)) ** 0.5 / 32) * 32
    heads = 8 * round(d / 360)
    return ModelConfig(
        vocab_size=round(0.0277 * wanted / d),
        d_model=d,
        n_layers=2,
        n_q_heads=heads,
        n_kv_heads=heads // 8,
        head_dim=64,
        n_experts=32,
        experts_per_token=4,
        d_expert=d,
        sliding_window=128,
    )


def filled(cfg: ModelConfig, held: str):
    """Random bits, quickly: a block repeated."""
    block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32).astype(held)
    return jax.tree.map(
        lambda x: jnp.asarray(np.resize(block, x.shape)), abstract_params(cfg, held)
    )


def peak_growth(act) -> float:
    """Bytes by which the anonymous resident memory grows at most while act() runs."""
    me, stop, most = psutil.Process(), threading.Event(), 0
    begun = me.memory_info().rss - me.memory_info().shared

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.005):
            now = me.memory_info()
            most = max(most, now.rss - now.shared - begun)

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    stop.set()
    watcher.join()
    return most


def measure(held: str, sent: str, gigabytes: float, directory: Path, rounds: int) -> dict:
    cfg = model(gigabytes, held)
    params = filled(cfg, held)
    nbytes = count_params(cfg)[0] * jnp.dtype(sent).itemsize
    turn, older = 0, []
    source = np.random.default_rng(0).integers(0, 255, BLOCK_BYTES, dtype=np.uint8)
    warm, plain = np.zeros_like(source), directory / f"plain-{os.getpid()}"
    blocks = [source[: min(BLOCK_BYTES, nbytes - at)] for at in range(0, nbytes, BLOCK_BYTES)]

    def export() -> None:
        write_files(params, cfg, directory, dtype=sent, run=f"bench{os.getpid()}", version=0)

    def export_over() -> None:
        """As the engine does from the third version on: into the pages of the last but one."""
        nonlocal turn, older
        over = older.pop(0) if len(older) > 1 else None
        run = f"over{os.getpid()}"
        older.append(
            write_files(params, cfg, directory, dtype=sent, run=run, version=turn, reuse=over)
        )
        turn += 1

    def convert() -> None:
        planned = plan_tensors(params, cfg, sent)
        fill_digests(params, cfg, planned, empty_manifest(planned, "", 0))

    def copy_warm() -> None:
        for block in blocks:
            np.copyto(warm[: block.size], block)

    def copy_fresh() -> None:
        for block in blocks:
            block.copy()

    def write_file() -> None:
        with open(plain, "wb", buffering=0) as file:
            for block in blocks:
                for start in range(0, block.size, 1 << 24):
                    file.write(block[start : start + (1 << 24)].data)

    sides = (export, export_over, convert, copy_warm, copy_fresh, write_file)
    for _ in range(4):  # two files, each written and mapped
        export_over()
    grown, times = peak_growth(export), {act.__name__: [] for act in sides}
    for _ in range(rounds):
        for act in sides:
            begun, busy = time.perf_counter(), time.process_time()
            act()
            spent = time.perf_counter() - begun, time.process_time() - busy
            times[act.__name__].append(spent)
            plain.unlink(missing_ok=True)
            shutil.rmtree(directory / f"jaxmoe-bench{os.getpid()}", ignore_errors=True)
    for update in older:
        update.close()
    speed, per_cpu = (
        {name: nbytes / np.median([t[i] for t in each]) / 1e9 for name, each in times.items()}
        for i in (0, 1)
    )
    return {
        "held": held,
        "sent": sent,
        "gigabytes": nbytes / 1e9,
        "gigabytes_per_s": speed,
        "gigabytes_per_cpu_s": per_cpu,
        "grown_megabytes": grown / 1e6,
    }


def line(row: dict, key: str) -> str:
    """Speeds, and export_over's over each yardstick's."""
    speed = row[key]
    return "  ".join(
        f"{name} {value:.2f}"
        + ("" if "export" in name else f" ({speed['export_over'] / value:.2f}x)")
        for name, value in speed.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    rows = []
    for held, sent in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")):
        row = measure(held, sent, args.gigabytes, args.directory, args.rounds)
        rows.append(row)
        print(f"{held} -> {sent}, {row['gigabytes']:.2f} GB; +{row['grown_megabytes']:.0f} MB")
        print(f"  GB/s       {line(row, 'gigabytes_per_s')}")
        print(f"  GB/cpu-s   {line(row, 'gigabytes_per_cpu_s')}", flush=True)
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "rows": rows}))


if __name__ == "__main__":
    main()
