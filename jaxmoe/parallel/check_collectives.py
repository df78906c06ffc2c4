# SPDX-License-Identifier: Apache-2.0
"""A check, before a run of several devices begins, that collectives return correct numbers.

A collective that returns wrong numbers raises no error, and a run would train on them. So each kind
of collective that the model uses sends integers whose results are known and exact in float32, over
each axis of the mesh and over all of them, in several sizes, several times. The ragged all-to-all
of experts is not checked, since not every accelerator has it.
Next: jaxmoe/parallel/scatter.py.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmoe.config import ConfigError
from jaxmoe.distributed.processes import gather_from_processes
from jaxmoe.parallel.exchange import device_index
from jaxmoe.parallel.scatter import reduce_scatter
from jaxmoe.parallel.sharding import Names, drop_unit_axes

UNALIGNED_BYTES, LARGE_BYTES = 148, 2**20  # bytes of a device's operand
# An operand twice as large as the previous one overflows the socket buffer that was sized for the
# previous one. In this case the reduce-scatter of gloo in jaxlib 0.10 and 0.11 returns wrong
# numbers.
DOUBLING_BYTES = (UNALIGNED_BYTES, 2**16, 2**17, 2**19, LARGE_BYTES)
# The known fault is a race, which shows in some rounds only.
ROUNDS = 40
Operation = Callable[[Array, Names], Array]
Case = tuple[str, Names, int]  # kind, axes, bytes of a device's operand


class CollectiveFault(NamedTuple):
    """A wrong result of a collective, as one process observed it."""

    kind: str
    axes: str
    bytes: int  # of a device's operand
    elements: int  # wrong ones, at most in one round
    rounds: int  # with a wrong element


def make_operations() -> dict[str, Operation]:
    """Return each kind of collective that the model uses, for an operand [devices, elements]."""
    return {
        "reduce-scatter": lambda x_ne, names: reduce_scatter(x_ne, names, dim=0)[0],
        "all-reduce": lambda x_ne, names: lax.psum(x_ne, names),
        "all-gather": lambda x_ne, names: lax.all_gather(x_ne[0], names),
        "all-to-all": lambda x_ne, names: lax.all_to_all(x_ne, names, 0, 0),
        "permute": _send_to_next,
    }


def check_collectives(
    mesh: Mesh | None, replacements: Mapping[str, Operation] | None = None
) -> None:
    """Raise ConfigError in all processes if a collective returns wrong numbers in one of them.

    All processes must call this before their first other program. `replacements` are other
    operations by the same names.
    """
    if mesh is None:
        return
    mesh = drop_unit_axes(mesh)
    # Threads of one process share memory: nothing crosses a wire, and one round is enough.
    is_wired = jax.process_count() > 1 or mesh.devices.flat[0].platform != "cpu"
    rounds = ROUNDS if is_wired else 1
    run_by_kind = make_operations() | dict(replacements or {})
    wrong_results = find_wrong_results(
        mesh, run_by_kind, _list_cases(mesh, is_wired=is_wired), rounds
    )
    # Every process must stop: one that alone continued would wait for the others in its next
    # collective.
    for process, results in enumerate(
        gather_from_processes([list(result) for result in wrong_results])
    ):
        if results:
            raise ConfigError(_format_error(process, CollectiveFault(*results[0]), rounds, mesh))


def _list_cases(mesh: Mesh, *, is_wired: bool) -> list[Case]:
    """Return the collectives to check, in order. If all devices are threads of one process there
    are few cases: no data crosses a wire, and compilation dominates."""
    names: Names = tuple(mesh.axis_names)
    if not is_wired:
        return [(kind, names, UNALIGNED_BYTES) for kind in make_operations()]
    groups = [(name,) for name in names] + ([names] if len(names) > 1 else [])
    return [
        (kind, axes, size)
        for axes in groups
        for kind in make_operations()
        for size in (DOUBLING_BYTES if kind == "reduce-scatter" else (UNALIGNED_BYTES, LARGE_BYTES))
    ]


def find_wrong_results(
    mesh: Mesh, run_by_kind: Mapping[str, Operation], cases: list[Case], rounds: int
) -> list[CollectiveFault]:
    """Run the cases for `rounds` rounds and return the wrong results that this process observes."""
    names = tuple(mesh.axis_names)

    def count_wrong(iteration: Array) -> Array:
        n_wrong = list[Array]()
        for kind, axes, size in cases:
            n_wrong.append(_count_wrong(run_by_kind[kind], kind, axes, size, iteration))
            # Each case depends on the previous one, so that they run in this order.
            iteration = iteration + jnp.minimum(n_wrong[-1], 0)
        return jnp.stack(n_wrong)[None]

    count_on_devices = jax.jit(
        jax.shard_map(count_wrong, mesh=mesh, in_specs=P(), out_specs=P(names), check_vma=False)
    )
    n_wrong_by_round = []  # [round, device, case]
    for iteration in range(rounds):
        result = count_on_devices(np.int32(iteration))
        n_wrong_by_round.append(np.concatenate([shard.data for shard in result.addressable_shards]))
    max_wrong_rc = np.max(n_wrong_by_round, axis=1)  # over this process's devices
    return [
        CollectiveFault(
            kind, " * ".join(axes), size, int(max_wrong_r.max()), int(np.sum(max_wrong_r > 0))
        )
        for (kind, axes, size), max_wrong_r in zip(cases, max_wrong_rc.T, strict=True)
        if max_wrong_r.any()
    ]


def _count_wrong(run: Operation, kind: str, names: Names, size: int, iteration: Array) -> Array:
    """Return the number of elements in which one collective differs from its known result."""
    n, index = math.prod(lax.axis_size(name) for name in names), device_index(names)
    n_elements = max(1, size // 4 // n)
    # The numbers change with the round and have no period that is a power of two, so data that is
    # stale or shifted by a buffer's size is wrong.
    every_ne = (jnp.arange(n * n_elements, dtype=jnp.int32) + 17 * iteration).reshape(
        n, n_elements
    ) % 251
    # Weights differ between neighbours, so a shard of the wrong device is detected; they are
    # bounded to keep the sum exact.
    weight_n = jnp.arange(n, dtype=jnp.int32) % 8 + 1  # of each device's numbers
    # 250 times this is below 2²⁴ for up to 14,000 devices, hence exact in float32
    sum_of_weights = sum(i % 8 + 1 for i in range(n))
    own_row = partial(lax.dynamic_index_in_dim, every_ne, index, 0, keepdims=False)
    expected = {
        "all-reduce": lambda: every_ne * sum_of_weights,
        "reduce-scatter": lambda: own_row() * sum_of_weights,
        "all-gather": lambda: every_ne[:1] * weight_n[:, None],
        "all-to-all": lambda: own_row()[None] * weight_n[:, None],
        "permute": lambda: every_ne[0] * weight_n[(index - 1) % n],
    }[kind]()
    actual = run((every_ne * weight_n[index]).astype(jnp.float32), names)
    return jnp.sum(actual != expected.astype(jnp.float32), dtype=jnp.int32)


def _send_to_next(x_ne: Array, names: Names) -> Array:
    """Return the numbers of the previous device, permuted around the ring."""
    n = math.prod(lax.axis_size(name) for name in names)
    return lax.ppermute(x_ne[0], names, [(i, (i + 1) % n) for i in range(n)])


def _format_error(process: int, result: CollectiveFault, rounds: int, mesh: Mesh) -> str:
    device = mesh.devices.flat[0]
    advice = (
        f"pip install 'jax>=0.12', or one process: JAX_NUM_CPU_DEVICES={mesh.devices.size}"
        if device.platform == "cpu"
        else "another version of jax and its libraries, or other machines"
    )
    article = "an" if result.kind.startswith("all") else "a"
    return (
        f"collectives must return correct numbers; {article} {result.kind} of {result.bytes} "
        f"bytes over {result.axes} gave process {process} up to {result.elements} wrong numbers in "
        f"{result.rounds} of {rounds} rounds (jax {jax.__version__}, jaxlib "
        f"{version('jaxlib')}, {device.device_kind}). Nothing was trained. Try {advice}."
    )
