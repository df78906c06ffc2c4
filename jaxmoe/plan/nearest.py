# SPDX-License-Identifier: Apache-2.0
"""The nearest setting that fits, by the dry run's arithmetic: nothing is compiled to find it.

Next: jaxmoe/plan/report.py says it.
"""

import math
from collections.abc import Iterator, Sequence

from jaxmoe.config import Config, ConfigError
from jaxmoe.config_file import override
from jaxmoe.memory import plan_memory
from jaxmoe.parallel.limits import check_mesh

SMALLEST = "the smallest microbatches"  # `suited` writes what that is on a mesh
MOST = 1024  # devices that are tried
CUTS = ("fsdp", "expert", "tensor", "sequence")  # what takes less of a device


def nearest(
    cfg: Config, there: int, off: tuple[float, float] = (1.0, 1.0)
) -> tuple[int, list[str], int]:
    """Devices, changes and bytes of the first config that needs at most `there` on each of them.

    As many devices as the run has are tried first, then twice as many and so on; of the settings
    those that cost little time first; the run's own mesh before others. Weights and moments in
    bfloat16, which is another run, are tried on as many devices alone. `off`: the compiler's bytes
    over the arithmetic's, of training and of sampling. No changes where MOST devices are too few.
    """
    n = cfg.mesh.devices
    while n <= MOST:
        for settings in ladder(cfg, half=n == cfg.mesh.devices):
            for mesh in meshes(cfg, n):
                if needs(cfg, [*mesh, *settings], off) > there:
                    continue
                for one in settings:  # what was taken before something larger was
                    fewer = [x for x in settings if x != one]
                    settings = fewer if needs(cfg, [*mesh, *fewer], off) <= there else settings
                changes = [*mesh, *settings]
                tried = suited(cfg, changes)
                return n, tried[1] if tried else [], round(needs(cfg, changes, off))
        n *= 2
    return n, [], 0


def needs(cfg: Config, changes: Sequence[str], off: tuple[float, float]) -> float:
    """Bytes at the worst time of a step with these changes; no number is above what is refused."""
    if (tried := suited(cfg, changes)) is None:
        return math.inf
    mem = plan_memory(tried[0])
    return max(mem.training * off[0], mem.sampling * off[1])


def ladder(cfg: Config, half: bool) -> Iterator[list[str]]:
    """Settings that need less and less; with `half` weights of half the bytes at last."""
    taken: list[str] = []
    yield taken
    few = max(8, cfg.rollout.samples_per_prompt)
    for change in [
        [] if cfg.optim.remat else ["optim.remat=True"],
        ["optim.remat_keeps="] if cfg.optim.remat_keeps else [],
        [SMALLEST],
        [f"rollout.max_parallel_sequences={few}"]
        if cfg.rollout.max_parallel_sequences > few else [],
        ["optim.remat_inputs=host"] if cfg.optim.remat_inputs == "device" else [],
        ["optim.moments=host"] if cfg.optim.moments == "device" else [],
        ["optim.param_dtype=bfloat16"] if half and cfg.optim.param_dtype == "float32" else [],
    ]:  # fmt: skip
        if change:
            taken = [*taken, *change]
            yield taken


def meshes(cfg: Config, devices: int) -> Iterator[list[str]]:
    """Those of so many devices, the run's own or the one with more of fsdp first."""
    sizes = cfg.mesh.sizes
    own = {**sizes, "fsdp": sizes["fsdp"] * devices // cfg.mesh.devices}
    found = [
        {"data": 1, **dict(zip(CUTS, cut, strict=True))} for cut in products(devices, len(CUTS))
    ]
    found.sort(key=lambda one: (sum(one[n] != own[n] for n in own), one["sequence"], one["tensor"]))
    for one in [own, *found]:
        yield [f"mesh.{name}={size}" for name, size in one.items() if size != sizes[name]]


def products(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write n as so many factors."""
    if factors == 1:
        yield (n,)
        return
    for first in range(1, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in products(n // first, factors - 1))


def suited(cfg: Config, changes: Sequence[str]) -> tuple[Config, list[str]] | None:
    """The config with these changes, its microbatches as its mesh needs them; None: refused."""
    smallest = SMALLEST in changes
    changes = [one for one in changes if one != SMALLEST]
    try:
        other = override(cfg, *changes)
        rows, shards = cfg.optim.tokens_per_microbatch // cfg.context, other.mesh.row_shards
        if cfg.optim.tokens_per_microbatch:
            rows = shards if smallest else math.ceil(rows / shards) * shards
            more = f"optim.tokens_per_microbatch={rows * cfg.context}"
            same = rows * cfg.context == cfg.optim.tokens_per_microbatch
        else:
            pieces = cfg.rollout.sequences_per_step // shards
            more, same = f"optim.microbatches={pieces}", not smallest
        if not same:
            changes, other = [*changes, more], override(other, more)
        check_mesh(other)
    except ConfigError:
        return None
    return other, changes
