# SPDX-License-Identifier: Apache-2.0
"""Find the nearest setting that fits, by the dry run's arithmetic, without compiling.

Next: jaxmoe/plan/report.py, which prints it.
"""

import math
from collections.abc import Iterator, Sequence

from jaxmoe.config import Config, ConfigError
from jaxmoe.config_file import override
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.run.memory import plan_memory

SMALLEST = "the smallest microbatches"  # `apply_changes` replaces it by a mesh's smallest
MAX_DEVICES = 1024
SHARD_AXES = ("fsdp", "expert", "tensor", "sequence")  # axes that reduce a device's memory


def find_nearest_fit(
    cfg: Config, capacity: int, ratios: tuple[float, float] = (1.0, 1.0)
) -> tuple[int, list[str], int]:
    """Devices, changes and bytes of the first config that needs at most `capacity` on each device.

    The run's number of devices is tried first, then its doubles; settings that cost little time
    before others; the run's mesh before others. Weights and moments in bfloat16 change the run, so
    they are tried only on the run's number of devices. `ratios` are the compiler's bytes over the
    arithmetic's, of training and of sampling. Returns no changes if MAX_DEVICES are too few.
    """
    n = cfg.mesh.devices
    while n <= MAX_DEVICES:
        for settings in memory_settings(cfg, half=n == cfg.mesh.devices):
            for mesh in mesh_settings(cfg, n):
                if needed_bytes(cfg, [*mesh, *settings], ratios) > capacity:
                    continue
                for setting in settings:  # drop settings that became unnecessary
                    fewer = [x for x in settings if x != setting]
                    settings = (
                        fewer
                        if needed_bytes(cfg, [*mesh, *fewer], ratios) <= capacity
                        else settings
                    )
                changes = [*mesh, *settings]
                applied = apply_changes(cfg, changes)
                return n, applied[1] if applied else [], round(needed_bytes(cfg, changes, ratios))
        n *= 2
    return n, [], 0


def needed_bytes(cfg: Config, changes: Sequence[str], ratios: tuple[float, float]) -> float:
    """Peak bytes of a step with these changes; infinite for a config that is refused."""
    if (applied := apply_changes(cfg, changes)) is None:
        return math.inf
    mem = plan_memory(applied[0])
    return max(mem.training * ratios[0], mem.sampling * ratios[1])


def memory_settings(cfg: Config, half: bool) -> Iterator[list[str]]:
    """Settings that need less and less memory; with `half` the last has bfloat16 weights."""
    settings: list[str] = []
    yield settings
    few = max(8, cfg.rollout.samples_per_prompt)
    for change in [
        [] if cfg.optim.remat else ["optim.remat=True"],
        ["optim.remat_keeps="] if cfg.optim.remat_keeps else [],
        [SMALLEST],
        [f"rollout.max_parallel_sequences={few}"]
        if cfg.rollout.max_parallel_sequences > few
        else [],
        ["optim.remat_inputs=host"] if cfg.optim.remat_inputs == "device" else [],
        ["optim.moments=host"] if cfg.optim.moments == "device" else [],
        ["optim.param_dtype=bfloat16"] if half and cfg.optim.param_dtype == "float32" else [],
    ]:
        if change:
            settings = [*settings, *change]
            yield settings


def mesh_settings(cfg: Config, devices: int) -> Iterator[list[str]]:
    """Changes to every mesh of `devices` devices, the run's mesh with more fsdp first."""
    sizes = cfg.mesh.sizes
    run_mesh = {**sizes, "fsdp": sizes["fsdp"] * devices // cfg.mesh.devices}
    candidates = [
        {"data": 1, **dict(zip(SHARD_AXES, cut, strict=True))}
        for cut in factorizations(devices, len(SHARD_AXES))
    ]
    # Sequence and tensor send activations in every layer, so small sizes of them come first.
    candidates.sort(
        key=lambda candidate: (
            sum(candidate[n] != run_mesh[n] for n in run_mesh),
            candidate["sequence"],
            candidate["tensor"],
        )
    )
    for candidate in [run_mesh, *candidates]:
        yield [f"mesh.{name}={size}" for name, size in candidate.items() if size != sizes[name]]


def factorizations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All factorizations of n into `factors` factors."""
    if factors == 1:
        yield (n,)
        return
    for first in range(1, n + 1):
        if n % first == 0:
            yield from (
                (first, *factors_left) for factors_left in factorizations(n // first, factors - 1)
            )


def apply_changes(cfg: Config, changes: Sequence[str]) -> tuple[Config, list[str]] | None:
    """The config with these changes and microbatches that its mesh needs; None if refused."""
    smallest = SMALLEST in changes
    changes = [change for change in changes if change != SMALLEST]
    try:
        changed = override(cfg, *changes)
        rows, shards = cfg.optim.tokens_per_microbatch // cfg.context, changed.mesh.row_shards
        if cfg.optim.tokens_per_microbatch:
            rows = shards if smallest else math.ceil(rows / shards) * shards
            microbatching = f"optim.tokens_per_microbatch={rows * cfg.context}"
            unchanged = rows * cfg.context == cfg.optim.tokens_per_microbatch
        else:
            pieces = cfg.rollout.sequences_per_step // shards
            microbatching, unchanged = f"optim.microbatches={pieces}", not smallest
        if not unchanged:
            changes, changed = [*changes, microbatching], override(changed, microbatching)
        check_mesh(changed)
    except ConfigError:
        return None
    return changed, changes
