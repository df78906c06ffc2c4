# SPDX-License-Identifier: Apache-2.0
"""The rings of eight chips through the real compilers, with the chips' kernels inside."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.parallel.halo import halo_attention
from jaxmoe.parallel.ring import ring_attention
from jaxmoe.parallel.ulysses import ulysses_attention
from pallas_kernels import ahead_of_time
from tests.jaxmoe.parallel.attention_on_devices import sequence_parallel

pytestmark = pytest.mark.aot

PLACES = "q_positions_BT", "k_positions_BS", "q_segment_ids_BT", "k_segment_ids_BS"
T, N, K, H = 8192, 64, 8, 64  # of GPT-OSS


def eight_devices(chip):
    """Eight chips, and the lowering and the kernels of theirs."""
    reason = ahead_of_time.compiler_unavailable(chip)
    if reason:
        pytest.skip(reason)
    if chip == "v5e":
        n_found = topologies.get_topology_desc("v5e:2x4", "tpu")
    else:
        config = ahead_of_time._target_config(ahead_of_time.GPUS[chip])
        n_found = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology="1x8x1"
        )
    platform = "tpu" if chip == "v5e" else "cuda"
    return Mesh(np.array(n_found.devices), ("sequence",)), platform


def compile_text(chip, method, window):
    """The program of values and gradients."""
    mesh, platform = eight_devices(chip)
    impl = "mosaic_tpu" if platform == "tpu" else "mosaic_gpu"
    attend = sequence_parallel(partial(method, impl=impl), mesh)

    def step(dout, dlse, q, k, v, sink, positions, segments):
        layout = dict(zip(PLACES, (positions, positions, segments, segments), strict=True))
        out, pull = jax.vjp(lambda *x: attend(*x, window=window, **layout), q, k, v, sink)
        return *out, *pull((dout, dlse))

    def abstract_array(*shape, dtype=jnp.bfloat16):
        sharding = NamedSharding(mesh, P(None, "sequence") if len(shape) > 1 else P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    q, k = abstract_array(1, T, N, H), abstract_array(1, T, K, H)
    dlse, sink = abstract_array(1, T, N, dtype=jnp.float32), abstract_array(N, dtype=jnp.float32)
    place = abstract_array(1, T, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        traced = jax.jit(step).trace(q, dlse, q, k, k, sink, place, place)
        return traced.lower(lowering_platforms=(platform,)).compile().as_text()


@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_keys_travel_while_a_device_computes(chip):
    n_found = 0
    for computation in compile_text(chip, ring_attention, None).split("\n\n"):
        lines = computation.splitlines()
        conditionals = [i for i, line in enumerate(lines) if " conditional(" in line]
        if conditionals:
            sent = [i for i, line in enumerate(lines) if " collective-permute-start(" in line]
            arrivals = [i for i, line in enumerate(lines) if " collective-permute-done(" in line]
            under_way = sum(i > max(conditionals) for i in arrivals)
            # libtpu waits for one of the sums of the backward pass before
            assert max(sent) < min(conditionals) and under_way >= max(1, len(arrivals) - 1)
            n_found += 1
    assert n_found == 2  # turns, of the forward and of the backward pass


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "h200"])
@pytest.mark.parametrize(
    "method, window", [(ulysses_attention, None), (halo_attention, 128), (ring_attention, 128)]
)
def test_the_other_ways_compile(chip, method, window):
    program = compile_text(chip, method, window)
    assert ("all-to-all" in program) == (method is ulysses_attention)
