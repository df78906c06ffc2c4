# SPDX-License-Identifier: Apache-2.0
"""Compile a config's RL step for this CPU twice, in two processes that keep compiled programs.

    python -m benchmarks.second_compile --config gptoss20b.py

No weights are made: the step is compiled for shapes. The second process must read what the first
one kept, as a resumed run does. Printed are the CPU seconds of tracing and of compiling, programs
that were compiled, and programs that were read.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter

import jax

from jaxmoe.config_file import load_config
from jaxmoe.distributed.compiled_programs import keep_compiled_programs
from jaxmoe.model import make_ops
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import drop_unit_axes
from jaxmoe.plan.compiled import mesh_on, step_base_shapes
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import stage_shapes
from jaxmoe.run.programs import batch_shapes, rl_program, sharded_batch_shapes, warmup_optimizer

EVENTS = "/jax/compilation_cache/"


def compile_step(config: str) -> dict[str, float]:
    """Compile the step on this machine's CPU; return seconds, and counts of JAX's cache."""
    cfg, counts = load_config(config), Counter[str]()
    jax.config.update("jax_num_cpu_devices", cfg.mesh.devices)
    jax.monitoring.register_event_listener(
        lambda event, **_: counts.update([event.removeprefix(EVENTS)])
    )
    print(keep_compiled_programs(), flush=True)
    mesh = mesh_on(cfg, jax.devices())
    run_mesh = mesh if cfg.mesh.devices > 1 else None
    a, tx = algorithm_from_config(cfg), rl_optimizer(cfg)
    ops = sharded_ops(make_ops(cfg), run_mesh, cfg.model, method=cfg.mesh.attention)
    state = stage_shapes(cfg, warmup_optimizer(cfg), tx, mesh)["rl"]
    arguments = (
        state,
        *sharded_batch_shapes(*batch_shapes(cfg, a), mesh),
        step_base_shapes(cfg),
    )
    program = rl_program(cfg, ops, mesh, a, tx, state)
    start = time.process_time()
    with jax.set_mesh(drop_unit_axes(mesh) if run_mesh else mesh):
        lowered = jax.jit(program.fn, **program.options).lower(*arguments)
        traced = time.process_time()
        lowered.compile()
    return {
        "trace_cpu_s": traced - start,
        "compile_cpu_s": time.process_time() - traced,
        "compiled": counts["cache_misses"],
        "read": counts["cache_hits"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="gptoss20b.py")
    parser.add_argument("--in-this-process", action="store_true")
    args = parser.parse_args()
    if args.in_this_process:
        print(json.dumps(compile_step(args.config)))
        return 0
    command = [sys.executable, "-m", "benchmarks.second_compile", "--in-this-process"]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"XDG_CACHE_HOME": folder, "JAX_PLATFORMS": "cpu"}
        for name in ("first", "second"):
            done = subprocess.run(
                [*command, "--config", args.config],
                env=environ,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(name, results[-1], flush=True)
    return int(results[1]["compiled"] > 0 or results[1]["read"] == 0)


if __name__ == "__main__":
    sys.exit(main())
