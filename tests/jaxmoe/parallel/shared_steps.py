# SPDX-License-Identifier: Apache-2.0
"""Two steps of RL with shared prompts and two without, as one of two processes; 0 prints them.

    python -m tests.jaxmoe.parallel.shared_steps

Prints {"on": [metrics of each step], "off": […]} as JSON.
"""

import json

import jax

from benchmarks.in_turn import draw_groups
from jaxmoe.batches.batch import shard_rows
from jaxmoe.batches.sharing_from_config import sharing_from_config
from jaxmoe.checkpoint.run import initial_params
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.processes import join_processes
from jaxmoe.model import make_ops
from jaxmoe.parallel.check_collectives import check_collectives
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import sharing_metrics, split_minibatches
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.run.programs import out_shardings_option, rl_program

SETTINGS = (
    "mesh.fsdp=2",
    "model.d_model=32",
    "model.d_expert=24",
    "model.n_layers=2",
    "rollout.sequences_per_step=8",
    "rollout.samples_per_prompt=4",
)


def main() -> None:
    join_processes()
    cfg = override(load_config("tiny.py"), *SETTINGS)
    mesh = make_mesh(cfg.mesh)
    check_collectives(mesh)
    plain, a, tx = make_ops(cfg), algorithm_from_config(cfg), rl_optimizer(cfg)
    ops, policy = sharded_ops(plain, mesh, cfg.model), initial_params(cfg, mesh)

    def make_state(policy):
        return init_state(Trained(policy), tx)

    shapes = jax.eval_shape(make_state, policy)
    init = jax.jit(make_state, **out_shardings_option(cfg, mesh, shapes, 0))
    program = rl_program(cfg, ops, mesh, a, tx, shapes)
    step = jax.jit(program.fn, **program.options)
    metrics_of = {}
    for choice in ("on", "off"):
        sharing = sharing_from_config(override(cfg, f"optim.share_prompts={choice}"), plain.attend)
        batch, minibatches = split_minibatches(draw_groups(cfg), a, seed=(0,), sharing=sharing)
        state, metrics_of[choice] = init(policy), []
        for _ in range(2):
            state, metrics, _ = step(state, shard_rows(batch, mesh), minibatches, None)
            values = {name: float(x) for name, x in jax.device_get(metrics).items()}
            metrics_of[choice].append(values | sharing_metrics(batch, minibatches))
    if jax.process_index() == 0:
        print(json.dumps(metrics_of))


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"):
        main()
