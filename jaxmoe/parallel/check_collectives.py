# SPDX-License-Identifier: Apache-2.0
"""Before a run of several devices begins: do they add and exchange numbers right?

A collective that gives wrong numbers gives no error, and a run would train on them. So each kind
that the model uses sends integers whose results are known and exact in float32, over each axis of
the mesh and over all of them, in several sizes, several times. Not among them is the ragged
all-to-all of experts on chips, which not every chip has.
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
from jaxmoe.parallel.exchange import place_in
from jaxmoe.parallel.processes import everyones
from jaxmoe.parallel.scatter import sum_scattered
from jaxmoe.parallel.sharding import Names, only_cutting

ODD, LARGE = 148, 2**20  # bytes of a device's operand
# Twice the size before fills what a socket was given for the size before, and leaves a rest behind:
# there gloo's reduce-scatter of jaxlib 0.10 and 0.11 goes wrong.
DOUBLED = (ODD, 2**16, 2**17, 2**19, LARGE)
ROUNDS = 40
Operation = Callable[[Array, Names], Array]
Case = tuple[str, Names, int]  # kind, axes, bytes of a device's operand


class WrongNumbers(NamedTuple):
    """An error of a collective, as one process saw it."""

    kind: str
    axes: str
    bytes: int  # of a device's operand
    elements: int  # at most in a round
    rounds: int


def operations() -> dict[str, Operation]:
    """Each kind of collective that the model uses, of an operand [devices, elements]."""
    return {
        "reduce-scatter": lambda x_ne, names: sum_scattered(x_ne, names, dim=0)[0],
        "all-reduce": lambda x_ne, names: lax.psum(x_ne, names),
        "all-gather": lambda x_ne, names: lax.all_gather(x_ne[0], names),
        "all-to-all": lambda x_ne, names: lax.all_to_all(x_ne, names, 0, 0),
        "permute": _next_ones,
    }


def check_collectives(mesh: Mesh | None, given: Mapping[str, Operation] | None = None) -> None:
    """Raises ConfigError in all processes where a collective is wrong in one.

    Called by all processes, before their first other program. `given` are other operations by the
    same names.
    """
    if mesh is None:
        return
    mesh = only_cutting(mesh)
    wired = jax.process_count() > 1 or mesh.devices.flat[0].platform != "cpu"
    rounds = ROUNDS if wired else 1
    run = operations() | dict(given or {})
    wrong = wrong_numbers(mesh, run, _cases(mesh, wired=wired), rounds)
    for process, found in enumerate(everyones([list(one) for one in wrong])):
        if found:
            raise ConfigError(_refusal(process, WrongNumbers(*found[0]), rounds, mesh))


def _cases(mesh: Mesh, *, wired: bool) -> list[Case]:
    """The collectives to try, in this order. Few where all devices are threads of one process: no
    wire is between them, and compiling is what takes time."""
    names: Names = tuple(mesh.axis_names)
    if not wired:
        return [(kind, names, ODD) for kind in operations()]
    groups = [(name,) for name in names] + ([names] if len(names) > 1 else [])
    return [
        (kind, over, size)
        for over in groups
        for kind in operations()
        for size in (DOUBLED if kind == "reduce-scatter" else (ODD, LARGE))
    ]


def wrong_numbers(
    mesh: Mesh, run: Mapping[str, Operation], cases: list[Case], rounds: int
) -> list[WrongNumbers]:
    """The errors that this process sees."""
    names = tuple(mesh.axis_names)

    def count(turn: Array) -> Array:
        wrong = list[Array]()
        for kind, over, size in cases:
            wrong.append(_wrong(run[kind], kind, over, size, turn))
            turn = turn + jnp.minimum(wrong[-1], 0)  # one after the other, in this order
        return jnp.stack(wrong)[None]

    counted = jax.jit(jax.shard_map(
        count, mesh=mesh, in_specs=P(), out_specs=P(names), check_vma=False
    ))  # fmt: skip
    seen = []  # [round, device, case]
    for turn in range(rounds):
        result = counted(np.int32(turn))
        seen.append(np.concatenate([shard.data for shard in result.addressable_shards]))
    most_rc = np.max(seen, axis=1)  # of this process's devices
    return [
        WrongNumbers(kind, " * ".join(over), size, int(most_r.max()), int(np.sum(most_r > 0)))
        for (kind, over, size), most_r in zip(cases, most_rc.T, strict=True)
        if most_r.any()
    ]


def _wrong(run: Operation, kind: str, names: Names, size: int, turn: Array) -> Array:
    """How many elements of one collective are not what they must be."""
    n, place = math.prod(lax.axis_size(name) for name in names), place_in(names)
    each = max(1, size // 4 // n)
    every_ne = (jnp.arange(n * each, dtype=jnp.int32) + 17 * turn).reshape(n, each) % 251
    weight_n = jnp.arange(n, dtype=jnp.int32) % 8 + 1  # of each device's numbers
    sum_of_weights = sum(i % 8 + 1 for i in range(n))  # times 250 below 2²⁴ up to 14,000 devices
    own = partial(lax.dynamic_index_in_dim, every_ne, place, 0, keepdims=False)
    want = {
        "all-reduce": lambda: every_ne * sum_of_weights,
        "reduce-scatter": lambda: own() * sum_of_weights,
        "all-gather": lambda: every_ne[:1] * weight_n[:, None],
        "all-to-all": lambda: own()[None] * weight_n[:, None],
        "permute": lambda: every_ne[0] * weight_n[(place - 1) % n],
    }[kind]()
    got = run((every_ne * weight_n[place]).astype(jnp.float32), names)
    return jnp.sum(got != want.astype(jnp.float32), dtype=jnp.int32)


def _next_ones(x_ne: Array, names: Names) -> Array:
    """Each device's numbers to the next device."""
    n = math.prod(lax.axis_size(name) for name in names)
    return lax.ppermute(x_ne[0], names, [(i, (i + 1) % n) for i in range(n)])


def _refusal(process: int, wrong: WrongNumbers, rounds: int, mesh: Mesh) -> str:
    device = mesh.devices.flat[0]
    advice = (
        f"pip install 'jax>=0.12', or one process: JAX_NUM_CPU_DEVICES={mesh.devices.size}"
        if device.platform == "cpu"
        else "another version of jax and its libraries, or other machines"
    )
    article = "an" if wrong.kind.startswith("all") else "a"
    return (
        f"devices must add and exchange numbers right; {article} {wrong.kind} of {wrong.bytes} "
        f"bytes over {wrong.axes} gave process {process} up to {wrong.elements} wrong numbers in "
        f"{wrong.rounds} of {rounds} rounds (jax {jax.__version__}, jaxlib "
        f"{version('jaxlib')}, {device.device_kind}). Nothing was trained. Try {advice}."
    )
