# SPDX-License-Identifier: Apache-2.0
"""The native engine and vLLM on the same model and prompts, in turn; and what a weight sync costs.

    python benchmarks/engines.py [--rounds 5] [--server] [--python PATH]

Run it with the Python of an environment that has vLLM too; with --server any Python does, and vLLM
is a child of --python. Tokens per CPU-second (user and system, all threads and, for a server, its
processes) and per second of wall time; every answer has exactly `--new` tokens. A sync is one
load(): vLLM's own routes (pause, start, update, finish, reset, resume) and what is ours around
them (export, digests asked for, probe). The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import psutil

from jaxmoe.config import VllmConfig
from jaxmoe.config_file import load_config
from jaxmoe.model import init_params, plain_ops
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.vllm.engine.vllm_engine import VllmEngine

OWN = ("pause", "start_update", "send_update", "finish_update", "reset_prefix_cache", "resume")


class Timed:
    """A backend that adds up what its methods take."""

    def __init__(self, backend):
        self._backend, self.spent = backend, {}

    def __getattr__(self, name):
        value = getattr(self._backend, name)
        if not callable(value):
            return value

        def timed(*args):
            start = time.perf_counter()
            try:
                return value(*args)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

        return timed


def cpu_s(name):
    """Of this process, and for vLLM of its children too: they are not quite idle beside native."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True) if name == "vllm" else []:
        try:
            times = child.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--python", default="")
    args = parser.parse_args()
    cfg = load_config("tiny_vllm.py").model
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(i, "", tuple(rng.integers(0, cfg.vocab_size, 24).tolist()), None)
        for i in range(args.prompts)
    ]
    sampling = Sampling(args.new, ())
    rows = args.prompts * args.samples
    sizes: Any = dict(max_prompt_tokens=24, max_new_tokens=args.new, max_rows=rows)
    weights = [jax.jit(init_params, static_argnums=1)(jax.random.key(s), cfg) for s in range(2)]
    vllm = VllmConfig(launch=int(args.server), python=args.python)
    with tempfile.TemporaryDirectory() as work:
        engines = {
            "native": NativeEngine(cfg, plain_ops(), **sizes),
            "vllm": VllmEngine(cfg, plain_ops(), vllm, work=Path(work), **sizes),
        }
        try:
            measure(engines, weights, prompts, sampling, args)
        finally:
            for engine in engines.values():
                engine.close()


def measure(engines, weights, prompts, sampling, args):
    tokens = len(prompts) * args.samples * args.new
    rates = {name: {"cpu": [], "wall": []} for name in engines}
    for engine in engines.values():  # compiled, warm
        engine.load(weights[0], 0)
        engine.generate(prompts, sampling, seed=0, samples=args.samples)
    for turn in range(1, args.rounds + 1):
        for name, engine in engines.items():
            before, start = cpu_s(name), time.perf_counter()
            out = engine.generate(prompts, sampling, seed=turn, samples=args.samples)
            rates[name]["wall"].append(tokens / (time.perf_counter() - start))
            rates[name]["cpu"].append(tokens / (cpu_s(name) - before))
            assert sum(len(r.tokens) for r in out) == tokens
    replica = engines["vllm"]._pool.replicas[0]
    replica.backend = timed = Timed(replica.backend)
    syncs = []
    for version in range(1, args.rounds + 4):
        timed.spent.clear()
        start = time.perf_counter()
        engines["vllm"].load(weights[version % 2], version)
        total = time.perf_counter() - start
        own = sum(timed.spent[name] for name in OWN)
        syncs.append(dict(timed.spent) | {"total": total, "own": own, "beyond": total - own})
    middle = {
        name: round(statistics.median(s.get(name, 0.0) for s in syncs), 4) for name in syncs[0]
    }
    result = {
        "where": "server" if args.server else "in process",
        "sequences": len(prompts) * args.samples,
        "new_tokens": args.new,
        "tokens_per_cpu_s": {n: round(statistics.median(r["cpu"])) for n, r in rates.items()},
        "tokens_per_s": {n: round(statistics.median(r["wall"])) for n, r in rates.items()},
        "native_over_vllm_per_cpu_s": round(
            statistics.median(
                a / b for a, b in zip(rates["native"]["cpu"], rates["vllm"]["cpu"], strict=True)
            ),
            2,
        ),
        "sync_s": middle,
        "sync_beyond_s": [round(s["beyond"], 3) for s in syncs],
    }
    for name, value in result.items():
        print(f"{name:28} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
