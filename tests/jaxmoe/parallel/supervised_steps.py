# SPDX-License-Identifier: Apache-2.0
"""Some supervised steps of tiny.py on a mesh, as one of so many processes; process 0 prints them.

    python -m tests.jaxmoe.parallel.supervised_steps STEPS AXIS [SETTING …]

Prints [[loss, gradient norm], …] as JSON. It compiles one program, where a whole run compiles
generation and the steps of RL as well.
"""

import json
import sys

import jax

from jaxmoe.batches.batch import supervised_batch
from jaxmoe.checkpoint.run import initial_params
from jaxmoe.collection.demonstrations import answer_tokens
from jaxmoe.collection.tasks import open_task
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.processes import join_processes
from jaxmoe.model import make_ops
from jaxmoe.parallel.check_collectives import check_collectives
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh, shard_batch
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.run.programs import out_shardings_option, supervised_program, warmup_optimizer


def main(steps: int, axis: str, *changes: str) -> None:
    join_processes()
    sizes = "warmup.sequences_per_step=4", "data.train_rows=64", "data.held_out_rows=4"
    cfg = override(load_config("tiny.py"), f"mesh.{axis}=2", *sizes, *changes)
    mesh = make_mesh(cfg.mesh)
    check_collectives(mesh)
    ops = sharded_ops(make_ops(cfg), mesh, cfg.model)
    task, tx, policy = open_task(cfg), warmup_optimizer(cfg), initial_params(cfg, mesh)

    def make_state(policy):
        return init_state(Trained(policy), tx)

    state = jax.jit(
        make_state, **out_shardings_option(cfg, mesh, jax.eval_shape(make_state, policy), 0)
    )(policy)
    program = supervised_program(cfg, ops, mesh, state)
    step, data = jax.jit(program.fn, **program.options), task.stream(4, cfg.seed)
    losses = []
    for _ in range(steps):
        prompts = next(data)
        batch = supervised_batch(
            prompts,
            [answer_tokens(p, task) for p in prompts],
            length=cfg.context,
            pad_id=task.tokenizer.pad_id,
        )
        state, metrics = step(state, shard_batch(batch, mesh))
        losses.append([float(metrics[name]) for name in ("loss", "grad/norm")])
    if jax.process_index() == 0:
        print(json.dumps(losses))


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"):
        main(int(sys.argv[1]), *sys.argv[2:])
