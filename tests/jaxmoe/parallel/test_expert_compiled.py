# SPDX-License-Identifier: Apache-2.0
"""Experts cut over devices, through the compilers of chips that have a ragged all-to-all.

Small sizes, forward and backward, with the chips' own kernels; nothing is executed. `-s` prints
what travels.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config import ModelConfig
from jaxmoe.model.moe.experts import apply_experts
from jaxmoe.parallel import expert
from jaxmoe.parallel.expert import experts_all_gather, experts_all_to_all
from jaxmoe.parallel.sharding import AXES
from pallas_kernels import grouped_matmul, grouped_swiglu
from pallas_kernels.ahead_of_time import (
    GPUS,
    _target_config,
    _without_compilation_cache,
    compiler_unavailable,
)
from tests.jaxmoe.parallel.collectives import list_collectives

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]

D, F, E, A = 256, 192, 16, 4
CFG = ModelConfig(
    vocab_size=97,
    d_model=D,
    n_layers=2,
    n_q_heads=4,
    n_kv_heads=2,
    head_dim=64,
    n_experts=E,
    experts_per_token=A,
    d_expert=F,
    sliding_window=128,
)
ROWS = 256  # tokens of a device
TOKENS, EXPERTS = P(("data", "fsdp", "expert", "sequence")), P(("expert", "tensor"))


def mesh_of(chip, topology, **axes):
    """A mesh of several devices of the chip, none of which is here."""
    reason = compiler_unavailable(chip)
    if reason:
        pytest.skip(reason)
    if chip in GPUS:
        topology_desc = topologies.get_topology_desc(
            platform="cuda", target_config=_target_config(GPUS[chip]), topology=topology
        )
    else:
        topology_desc = topologies.get_topology_desc(topology, "tpu")
    shape = [axes.get(name, 1) for name in AXES]
    return Mesh(np.array(topology_desc.devices).reshape(shape), AXES)


def compile_dispatch(mesh, chip, dispatch, backward=True):
    """The dispatch on the mesh, with its gradients unless told otherwise."""
    kernel_impl = "mosaic_gpu" if chip in GPUS else "mosaic_tpu"
    inner = partial(
        apply_experts,
        gate_up=partial(grouped_swiglu, impl=kernel_impl),
        down=partial(grouped_matmul, impl=kernel_impl),
    )

    def run_shard(h, indices, weights, layer):
        return dispatch(h, indices, weights, layer, CFG, experts=inner)

    run = jax.shard_map(
        run_shard,
        mesh=mesh,
        in_specs=(TOKENS, TOKENS, TOKENS, EXPERTS),
        out_specs=TOKENS,
        check_vma=False,
    )

    def run_both(h, indices, weights, layer):
        y, pull = jax.vjp(lambda h, w, layer: run(h, indices, w, layer), h, weights, layer)
        return y, pull(y)

    def abstract_array(spec, dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    rows = mesh.size // mesh.shape["tensor"]
    layer = {
        name: abstract_array(EXPERTS, jnp.bfloat16, E, *shape)
        for name, shape in dict(
            w_gate_up=(D, 2 * F), b_gate_up=(2 * F,), w_down=(F, D), b_down=(D,)
        ).items()
    }
    args = (
        abstract_array(TOKENS, jnp.bfloat16, rows, ROWS, D),
        abstract_array(TOKENS, jnp.int32, rows, ROWS, A),
        abstract_array(TOKENS, jnp.float32, rows, ROWS, A),
        layer,
    )
    platform = "cuda" if chip in GPUS else "tpu"
    with jax.set_mesh(mesh), _without_compilation_cache():
        traced = jax.jit(run_both if backward else run).trace(*args)
        return traced.lower(lowering_platforms=(platform,)).compile()


@pytest.mark.parametrize(
    "chip, topology, axes",
    [
        ("h200", "1x1x8", dict(expert=8)),
        ("v5p", "v5p:2x2x1", dict(expert=4)),
        ("v6e", "v6e:2x4", dict(expert=4, tensor=2)),
    ],
)
def test_the_exchange_compiles_forward_and_backward(chip, topology, axes):
    text = compile_dispatch(mesh_of(chip, topology, **axes), chip, experts_all_to_all).as_text()
    assert text.count("ragged-all-to-all") >= 8  # to and fro, forward and backward, two rounds


def test_on_a_big_v5e_tokens_are_gathered():
    mesh = mesh_of("v5e", "v5e:8x8", fsdp=8, expert=8)
    assert "reduce-scatter" in compile_dispatch(mesh, "v5e", experts_all_gather).as_text()
    with pytest.raises(Exception, match="limited ICI routing"):
        compile_dispatch(mesh, "v5e", experts_all_to_all)


@pytest.mark.slow  # four programs, 20 s each
@pytest.mark.parametrize("dispatch", [experts_all_gather, experts_all_to_all])
def test_temporaries_do_not_grow_with_devices(dispatch, monkeypatch):
    """Tokens of 8 devices are gathered at once, of 16 in two parts."""
    monkeypatch.setattr(expert, "MAX_GATHERED_BYTES", 8 * ROWS * D * 4)
    eight, sixteen = (
        compile_dispatch(mesh_of("h200", hosts, expert=n), "h200", dispatch).memory_analysis()
        for n, hosts in ((8, "1x1x8"), (16, "1x2x8"))
    )
    print(dispatch.__name__, eight.temp_size_in_bytes, sixteen.temp_size_in_bytes)
    assert sixteen.temp_size_in_bytes < 1.05 * eight.temp_size_in_bytes


def test_the_exchange_sends_fewer_bytes_than_gathering():
    """The exchange sends 4 rows each way in 2 bytes; gathering sends 1 row to each of 8 shards, and
    8 float32 sums back."""
    mesh, n = mesh_of("h200", "1x1x8", expert=8), 8
    sent = [
        list_collectives(compile_dispatch(mesh, "h200", dispatch, backward=False).as_text())
        for dispatch in (experts_all_gather, experts_all_to_all)
    ]
    gathered, exchanged = (sum(size for _, size in topology_desc) for topology_desc in sent)
    print(f"bytes of a token: gathered {gathered / ROWS:.0f}, exchanged {exchanged / ROWS:.0f}")
    counts, rounds = n * E * 4, 4
    assert gathered == ROWS * n * (2 * D + 8 * A + 4 * D)  # h, indices and weights; the sum
    assert exchanged == ROWS * A * 2 * 2 * D + counts + rounds
