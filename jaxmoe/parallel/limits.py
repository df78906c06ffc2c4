# SPDX-License-Identifier: Apache-2.0
"""What a mesh can cut, asked before anything is allocated. Next: jaxmoe/parallel/sharding.py."""

import contextlib

import jax

from jaxmoe.config import Config, require
from jaxmoe.parallel.host import free_bytes


def check_mesh(cfg: Config, devices: int | None = None) -> None:
    """Raises ConfigError where the mesh does not fit the devices, the model or the batch.

    `devices` are those there are; None: another machine's, as for a dry run.
    """
    mesh, model, optim = cfg.mesh, cfg.model, cfg.optim
    sizes = " * ".join(f"{name} {size}" for name, size in mesh.sizes.items() if size > 1) or "all 1"
    several = devices is not None and jax.process_count() > 1
    require(
        devices is None or mesh.devices == devices or (mesh.devices == 1 and not several),
        f"the axes of mesh ({sizes}) must multiply to the devices there are, {devices}; they make "
        f"{mesh.devices}. Try {_other(cfg, devices)}.",
    )
    if several:
        _several(cfg)
    if mesh.devices == 1:
        return
    _divides(mesh.sequence, "mesh.sequence", cfg.context,
             "data.max_prompt_tokens + rollout.max_new_tokens")  # fmt: skip
    for name in ("n_q_heads", "n_kv_heads"):
        _divides(mesh.tensor, "mesh.tensor", getattr(model, name), f"model.{name}")
    if mesh.sequence > 1 and mesh.attention == "zigzag":
        _divides(2 * mesh.sequence, "2 * mesh.sequence", cfg.context,
                 "data.max_prompt_tokens + rollout.max_new_tokens")  # fmt: skip
    if mesh.sequence > 1 and mesh.attention == "ulysses":
        _divides(mesh.sequence * mesh.tensor, "mesh.sequence * mesh.tensor", model.n_q_heads,
                 "model.n_q_heads")  # fmt: skip
    _divides(mesh.expert * mesh.tensor, "mesh.expert * mesh.tensor", model.n_experts,
             "model.n_experts")  # fmt: skip
    by = "mesh.data * mesh.fsdp * mesh.expert"
    if optim.tokens_per_microbatch:
        rows = optim.tokens_per_microbatch // cfg.context
        require(
            rows % mesh.row_shards == 0,
            f"optim.tokens_per_microbatch ({optim.tokens_per_microbatch}) must hold a multiple of "
            f"{by} ({mesh.row_shards}) rows of {cfg.context} tokens; it holds {rows}. Try --set "
            f"optim.tokens_per_microbatch={mesh.row_shards * cfg.context}.",
        )
        return
    for name, rows in _rows(cfg):
        _divides(mesh.row_shards, by, rows, name)


def _several(cfg: Config) -> None:
    """What several processes cannot do."""
    r = cfg.rollout
    require(
        r.max_staleness == 0,
        f"rollout.max_staleness ({r.max_staleness}) must be 0 in several processes, which sample "
        "in turn with the training: in a second thread their collectives would come in another "
        "order. Try --set rollout.max_staleness=0.",
    )
    servers = bool(r.vllm.urls) or r.vllm.launch > 0
    require(
        r.engine == "native" or servers,
        "several processes must sample from vLLM servers that all of them share, not from a vLLM "
        "in one of them. Try --set rollout.vllm.url=http://HOST:8000, or --set "
        "rollout.vllm.launch=1.",
    )
    require(
        r.engine == "native" or r.vllm.transport == "files",
        f"rollout.vllm.transport ({r.vllm.transport}) must be files in several processes: the "
        "first alone gives a server that came back its weights, and a tensor on a mesh needs all. "
        "Try --set rollout.vllm.transport=files --set rollout.vllm.weights_dir=A_SHARED_FOLDER.",
    )


def check_host(cfg: Config, each: int) -> None:
    """Raises ConfigError where this process's host cannot keep so many bytes for each device."""
    if not cfg.optim.uses_host_memory:
        return
    back = "Try --set optim.moments=device --set optim.remat_inputs=device."
    device, kinds = jax.local_devices()[0], set[str]()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a platform without any
        kinds = {memory.kind for memory in device.addressable_memories()}
    require(
        "pinned_host" in kinds,
        "for optim.moments=host and optim.remat_inputs=host a device must reach its host's memory; "
        f"{device.device_kind} ({device.platform}) has {', '.join(sorted(kinds)) or 'none'}. "
        + back,
    )
    devices, there = min(cfg.mesh.devices, jax.local_device_count()), free_bytes()
    require(
        there is None or each * devices <= there,
        f"what waits on the host must fit into the {there or 0:,} bytes that are free there, and "
        f"needs {each * devices:,}, {each:,} for each of {devices} devices. {back}",
    )


def _other(cfg: Config, devices: int | None) -> str:
    if devices == 1 and jax.default_backend() == "cpu":
        return f"JAX_NUM_CPU_DEVICES={cfg.mesh.devices} before the command"
    ones = [
        f"--set mesh.{name}=1" for name, n in cfg.mesh.sizes.items() if n > 1 and name != "fsdp"
    ]
    return " ".join([f"--set mesh.fsdp={devices}", *ones])


def _rows(cfg: Config) -> list[tuple[str, int]]:
    """The rows that a step of each stage reads at once."""
    cut = max(1, cfg.optim.microbatches // cfg.loss.minibatches)
    at_once = cfg.rollout.sequences_per_step // cfg.loss.minibatches // cut
    rows = [("the rows of a microbatch", at_once)]
    if cfg.warmup.steps:
        at_once = cfg.warmup.sequences_per_step // cfg.optim.microbatches
        rows.append(("warmup.sequences_per_step / optim.microbatches", at_once))
    return rows


def _divides(size: int, name: str, whole: int, what: str) -> None:
    require(
        whole % size == 0,
        f"{name} ({size}) must divide {what} ({whole}). Try another mesh, of which "
        "--dry-run says what each device holds.",
    )
