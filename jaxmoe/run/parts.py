# SPDX-License-Identifier: Apache-2.0
"""The parts of a run, made from its config. Next: jaxmoe/train.py runs them.

`dataclasses.replace(parts, task=my_task)` runs with another part: the loop takes each part from
here and makes none by itself.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.sharing_from_config import sharing_from_config
from jaxmoe.checkpoint.run import code_version
from jaxmoe.collection.batches import make_batch
from jaxmoe.collection.open_rollouts import Rollouts, open_rollouts
from jaxmoe.collection.source_digests import source_digests
from jaxmoe.collection.tasks import Task, open_task
from jaxmoe.config import Config, to_json
from jaxmoe.distributed.processes import check_same_everywhere
from jaxmoe.model import Ops, make_engine_ops, make_ops
from jaxmoe.model.trainable import count_trained
from jaxmoe.observe.plots import plot_run
from jaxmoe.observe.trackers import check_installed
from jaxmoe.parallel.check_collectives import check_collectives
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.records import Rollout
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rollout.engine import Engine, open_engine
from jaxmoe.run.kernels import Decision, choose_run_kernels
from jaxmoe.run.memory import check_memory
from jaxmoe.run.programs import JitProgram, rl_program, supervised_program
from jaxmoe.run.teacher import Teacher, open_teacher
from jaxmoe.vllm.client.teacher import TeacherServer

STAGES = ("training", "sampling", "syncing")  # stages of the memory check


@dataclass(frozen=True)
class Parts:
    """Everything that a run is made of. Functions take the place of what is made during the run."""

    kernels: Decision  # the implementations in `ops`, for config.json
    ops: Ops  # of one device; the run shards them over the mesh
    engine_ops: Ops | None  # of an engine with the trainer's forward; None: `ops`
    mesh: Mesh | None  # None: one device
    algorithm: Algorithm
    tx: optax.GradientTransformation  # optimizer of RL
    task: Task
    # A second model; None: there is no teacher, or it is the policy before RL.
    teacher: Teacher | TeacherServer | None = None
    open_engine: Callable[[Config, Ops, Path, Mesh | None], Engine] = open_engine
    open_rollouts: Callable[..., Rollouts] = open_rollouts
    make_batch: Callable[[Config, Task, list[Rollout], np.ndarray], Batch] = make_batch
    supervised_program: Callable[..., JitProgram] = supervised_program  # the step of the warm start
    rl_program: Callable[..., JitProgram] = rl_program  # the step of RL
    plot_run: Callable[..., None] = plot_run


def make_parts(cfg: Config) -> Parts:
    """Return the parts of the config's run.

    Raises ConfigError for settings that this machine cannot run, before anything is written.
    """
    n_trained, n_params = count_trained(cfg)
    sources = json.dumps(source_digests(cfg), indent=1)
    # Processes with different configs or code would compile different programs, and wait for each
    # other's collectives forever.
    check_same_everywhere(config=to_json(cfg), code=code_version(), sources=sources)
    # Before this process opens the device, because a TPU admits one process and the check is
    # another.
    kernels = choose_run_kernels(cfg)
    ops = make_ops(cfg, kernels.impls)
    check_mesh(cfg, jax.device_count())
    sharing_from_config(cfg, ops.attend)  # refuses what cannot be shared; train.py calls it again
    check_memory(cfg, *STAGES)
    mesh = make_mesh(cfg.mesh)
    check_collectives(mesh)
    # Printed after the checks, so that a refused run prints only its error.
    kernels.print_decision()
    print(f"trains   {n_trained:,} of {n_params:,} parameters", flush=True)
    if (n_devices := jax.device_count()) > cfg.mesh.devices:
        used = f"using {cfg.mesh.devices} of {n_devices} devices"
        print(f"devices  {used}; use all with --set mesh.fsdp={n_devices}", flush=True)
    check_installed(cfg.observe.trackers)
    return Parts(
        kernels,
        ops,
        make_engine_ops(cfg, kernels.impls),
        mesh,
        algorithm_from_config(cfg),
        task=open_task(cfg),
        tx=rl_optimizer(cfg),
        teacher=open_teacher(cfg, kernels.impls, mesh),
    )
