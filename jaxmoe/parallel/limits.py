# SPDX-License-Identifier: Apache-2.0
"""Checks of a mesh against devices, model and batch, before anything is allocated.

Next: jaxmoe/parallel/sharding.py.
"""

import contextlib

import jax

from jaxmoe.config import Config, describe_engine, require
from jaxmoe.config.episodes import context_name
from jaxmoe.distributed.host import count_free_bytes
from jaxmoe.parallel.rounding import check_rounded_mesh


def check_mesh(cfg: Config, devices: int | None = None) -> None:
    """Raise ConfigError if the mesh does not fit the devices, the model or the batch.

    `devices` is the number of available devices; None means another machine's, as for a dry run.
    """
    mesh, model, optim = cfg.mesh, cfg.model, cfg.optim
    sizes = " * ".join(f"{name} {size}" for name, size in mesh.sizes.items() if size > 1) or "all 1"
    has_processes = devices is not None and jax.process_count() > 1
    require(
        # A config of one device may leave a machine's other devices idle. Several processes may
        # not, since each runs the program on its own devices.
        devices is None or mesh.devices == devices or (mesh.devices == 1 and not has_processes),
        f"the axes of mesh ({sizes}) must multiply to the number of devices, {devices}; they give "
        f"{mesh.devices}. Try {_suggest_mesh(cfg, devices)}.",
    )
    if has_processes:
        _check_processes(cfg)
    if mesh.devices == 1:
        return
    _check_divides(mesh.sequence, "mesh.sequence", cfg.context, context_name(cfg))
    if cfg.rollout.max_episode_tokens:  # the rows of a warm start have one context
        _check_divides(mesh.sequence, "mesh.sequence", cfg.read_context, "rollout.max_context")
    for name in ("n_q_heads", "n_kv_heads"):
        _check_divides(mesh.tensor, "mesh.tensor", getattr(model, name), f"model.{name}")
    if mesh.sequence > 1 and mesh.attention == "zigzag":
        # A zigzag gives each device two chunks of a row.
        _check_divides(2 * mesh.sequence, "2 * mesh.sequence", cfg.context, context_name(cfg))
    if mesh.sequence > 1 and mesh.attention == "ulysses":
        # Ulysses divides the heads that tensor leaves on a device among the devices of sequence.
        _check_divides(
            mesh.sequence * mesh.tensor,
            "mesh.sequence * mesh.tensor",
            model.n_q_heads,
            "model.n_q_heads",
        )
    # Experts are sharded over tensor too, and every device must own the same number of them.
    _check_divides(
        mesh.expert * mesh.tensor, "mesh.expert * mesh.tensor", model.n_experts, "model.n_experts"
    )
    check_rounded_mesh(cfg)
    row_axes = "mesh.data * mesh.fsdp * mesh.expert"
    if optim.tokens_per_microbatch:
        rows = optim.tokens_per_microbatch // cfg.context
        require(
            rows % mesh.row_shards == 0,
            f"optim.tokens_per_microbatch ({optim.tokens_per_microbatch}) must fit a multiple of "
            f"{row_axes} ({mesh.row_shards}) rows of {cfg.context} tokens; it fits {rows}. Try "
            f"--set optim.tokens_per_microbatch={mesh.row_shards * cfg.context}.",
        )
        return
    for name, rows in _rows_of_stages(cfg):
        _check_divides(mesh.row_shards, row_axes, rows, name)


def _check_processes(cfg: Config) -> None:
    """Raise ConfigError for settings that several processes do not support."""
    rollout, engine = cfg.rollout, describe_engine(cfg)
    require(
        rollout.max_staleness == 0 or engine.first_process_samples,
        f"rollout.max_staleness ({rollout.max_staleness}) must be 0 for the {rollout.engine} "
        "engine of several processes, which alternate between sampling and training: in a second "
        "thread their collectives would run in another order. vLLM's servers can sample ahead. "
        f"{rollout.newest_weights_advice}",
    )
    engine.check_processes(cfg)


def check_host(cfg: Config, bytes_per_device: int) -> None:
    """Raise ConfigError if this process's host cannot store `bytes_per_device` for each device."""
    if not cfg.optim.uses_host_memory:
        return
    advice = "Try --set optim.moments=device --set optim.remat_inputs=device."
    device, kinds = jax.local_devices()[0], set[str]()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a platform without memory kinds
        kinds = {memory.kind for memory in device.addressable_memories()}
    require(
        "pinned_host" in kinds,
        "optim.moments=host and optim.remat_inputs=host need a device that can access host memory; "
        f"{device.device_kind} ({device.platform}) has {', '.join(sorted(kinds)) or 'none'}. "
        + advice,
    )
    # Pinned memory is memory of a device's own host, so only this process's devices count.
    devices, free = min(cfg.mesh.devices, jax.local_device_count()), count_free_bytes()
    require(
        free is None or bytes_per_device * devices <= free,
        f"offloaded arrays need {bytes_per_device * devices:,} bytes of host memory "
        f"({bytes_per_device:,} for each of {devices} devices), but only {free or 0:,} are free. "
        f"{advice}",
    )


def _suggest_mesh(cfg: Config, devices: int | None) -> str:
    if devices == 1 and jax.default_backend() == "cpu":
        return f"JAX_NUM_CPU_DEVICES={cfg.mesh.devices} before the command"
    flags = [
        f"--set mesh.{name}=1" for name, n in cfg.mesh.sizes.items() if n > 1 and name != "fsdp"
    ]
    return " ".join([f"--set mesh.fsdp={devices}", *flags])


def _rows_of_stages(cfg: Config) -> list[tuple[str, int]]:
    """Return the rows that a step of each stage reads at once, with a name for messages."""
    cut = max(1, cfg.optim.microbatches // cfg.loss.minibatches)
    at_once = cfg.rollout.sequences_per_step // cfg.loss.minibatches // cut
    rows = [("the rows of a microbatch", at_once)]
    if cfg.warmup.steps:
        at_once = cfg.warmup.sequences_per_step // cfg.optim.microbatches
        rows.append(("warmup.sequences_per_step / optim.microbatches", at_once))
    return rows


def _check_divides(size: int, name: str, total: int, total_name: str) -> None:
    require(
        total % size == 0,
        f"{name} ({size}) must divide {total_name} ({total}). Try another mesh; --dry-run "
        "prints what each device stores.",
    )
