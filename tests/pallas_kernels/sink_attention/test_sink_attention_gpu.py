# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of sink attention, interpreted on a CPU: values and every gradient.

The interpreter runs the copies, the barriers and the order of blocks as they are; the products are
plain dots. What the real compiler says is in test_sink_attention_compile_gpu.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Target
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases, pallas_gpu
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.sink_attention.hopper import pallas_gpu_backward, pallas_gpu_blocks
from pallas_kernels.sink_attention.hopper.pallas_gpu_blocks import MosaicTiles
from tests.pallas_kernels.sink_attention import attention_oracle as oracle

OLD = jax.__version_info__ < (0, 11)
full_matrix = pytest.mark.slow
fast = pytest.mark.skipif(OLD, reason="jax 0.10 takes 10 seconds to interpret one block")

# Several blocks of queries and of keys, none of them full, and more steps than a ring has stages.
# Tests share sizes where they can: compiling is what they cost.
PACKED = AttentionCase("packed", 1, 90, 90, 2, 1, 64, 9, "packed")  # segments are longer than 9
SMALL = (  # and the cores that share the tiles
    (PACKED, jnp.bfloat16, 1),
    (PACKED._replace(name="left", layout="left", sinks="none"), jnp.bfloat16, 1),
    (AttentionCase("chunk", 1, 24, 101, 6, 2, 128, 0, "chunk", "big"), jnp.float16, 4),
    (AttentionCase("ring", 2, 50, 91, 2, 1, 64, 9, "ring"), jnp.bfloat16, 1),
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short steps and a short ring, so that short rows take every path; in windows two heads."""

    def tiles(consumers):
        return lambda _, window, G: (
            MosaicTiles(2, 32, 2, heads=2)
            if window and G % 2 == 0
            else MosaicTiles(consumers, 32, 2)
        )

    monkeypatch.setattr(pallas_gpu, "mosaic_forward_tiles", tiles(3))
    monkeypatch.setattr(pallas_gpu_backward, "mosaic_dq_tiles", tiles(1))
    monkeypatch.setattr(pallas_gpu_backward, "mosaic_dkv_tiles", lambda *_: MosaicTiles(1, 32, 3))


def on_cores(monkeypatch, count):
    for kernels in (pallas_gpu, pallas_gpu_backward):
        monkeypatch.setattr(kernels, "count_gpu_cores", lambda: count)


kernel = partial(pallas_gpu.sink_attention_mosaic_gpu, interpret=True)


@partial(jax.jit, static_argnums=(0, 1))
def run(window, scale, dout, dlse, q, k, v, sink, *places):
    out, pull = jax.vjp(lambda *x: kernel(*x, Layout(*places), window, scale), q, k, v, sink)
    return *out, *pull((dout, dlse))


def compare(case, dtype, scale=None):
    inputs, ct = cases.init_attention_inputs(case, dtype), oracle.cotangents(case, dtype)
    actual = run(case.window, case.H**-0.5 if scale is None else scale, *ct, *inputs)
    assert [x.dtype for x in actual] == [dtype, jnp.float32, dtype, dtype, dtype, jnp.float32]
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in actual[2:])
    oracle.compare(case, actual, inputs, ct, scale=scale)


@fast
@pytest.mark.parametrize("case, dtype, cores", SMALL, ids=lambda x: getattr(x, "name", ""))
def test_values_and_gradients_match_the_plain_formula(case, dtype, cores, monkeypatch):
    on_cores(monkeypatch, cores)
    compare(case, dtype)


def share_first_segment(inputs):
    """The inputs with the first segment as the prompt of all others, whose positions follow it."""
    segments = np.asarray(inputs.k_segment_ids_BS)
    prompt = (segments == 1).sum(1, keepdims=True)
    positions = jnp.asarray(inputs.k_positions_BS + prompt * (segments > 1), jnp.int32)
    last = jnp.asarray(np.where(segments == 1, segments.max(), segments), jnp.int32)
    places = positions, positions, inputs.q_segment_ids_BT, inputs.k_segment_ids_BS, last
    return *inputs[:4], *places


@fast
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("shared", 1, 150, 150, 2, 1, 64, 0, "packed"),
        AttentionCase("window_shared", 1, 150, 150, 4, 2, 64, 40, "packed"),
    ],
    ids=lambda case: case.name,
)
def test_segments_read_the_keys_of_their_prompt(case, monkeypatch):
    on_cores(monkeypatch, 1)
    inputs = share_first_segment(cases.init_attention_inputs(case, jnp.bfloat16))
    ct = oracle.cotangents(case, jnp.bfloat16)
    actual = run(case.window, case.H**-0.5, *ct, *inputs)
    oracle.compare(case, actual, inputs, ct)


def test_one_block_with_any_scale_is_right():
    compare(AttentionCase("one", 1, 30, 30, 1, 1, 64), jnp.bfloat16, -0.3)


@fast
def test_unseeing_query_tiles_change_no_others(monkeypatch):
    """A core's next tile has its first scores from the last step of the one before."""
    on_cores(monkeypatch, 1)
    case = AttentionCase("blind", 1, 250, 90, 2, 1, 64, 9, "chunk")
    inputs, ct = (
        cases.init_attention_inputs(case, jnp.bfloat16),
        oracle.cotangents(case, jnp.bfloat16),
    )
    blind = (np.arange(250) // 64) % 2 == 0  # of tiles of 64 queries the first and the third
    inputs = *inputs[:6], jnp.where(blind, 0, inputs[6]), inputs[7]
    actual = run(case.window, case.H**-0.5, *ct, *inputs)
    assert not np.asarray(actual[0].astype(jnp.float32))[:, blind].any()
    oracle.compare(case, actual, inputs, ct)


@full_matrix
@fast
@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("H", [64, 128])
def test_every_case_with_real_tiles(case, H, monkeypatch):
    monkeypatch.undo()
    K = min(case.K, 2)
    compare(case._replace(N=2 * K, K=K, H=H), jnp.bfloat16)


@full_matrix
@fast
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(
            "two_blocks", 1, 250, 250, 2, 1, 64, 0, "packed"
        ),  # the last one has idle warpgroups
        AttentionCase("window", 1, 100, 160, 4, 2, 64, 40, "chunk"),
    ],
    ids=lambda case: case.name,
)
def test_no_warpgroup_races_with_another(races, monkeypatch, case):
    """Interpreted products are plain reads, which would need a fence before the next copy; those
    of the chip are asynchronous like the copies, and have none."""
    arrive = plgpu.barrier_arrive

    def fence_and_arrive(barrier):
        plgpu.commit_smem()
        arrive(barrier)

    monkeypatch.setattr(plgpu, "barrier_arrive", fence_and_arrive)
    on_cores(monkeypatch, 1)  # whose tiles follow one another

    def query_tiles(_, window, __):
        return MosaicTiles(2, 32, 2, heads=2 if window else 1)

    monkeypatch.setattr(pallas_gpu_backward, "mosaic_dq_tiles", query_tiles)
    monkeypatch.setattr(pallas_gpu_backward, "mosaic_dkv_tiles", lambda *_: MosaicTiles(2, 32, 2))
    compare(case, jnp.bfloat16)
    assert not races()


def test_what_it_cannot_do_is_said(monkeypatch):
    q, k = jnp.ones((1, 4, 2, 64), jnp.bfloat16), jnp.ones((1, 4, 1, 64), jnp.bfloat16)
    assert "needs a Hopper GPU" in pallas_gpu.sink_attention_mosaic_gpu_unsupported(q, k)
    monkeypatch.setattr(pallas_gpu_blocks, "target_device", lambda: Target("gpu", "NVIDIA H200"))
    assert pallas_gpu.sink_attention_mosaic_gpu_unsupported(q, k) is None
    for reason, change in (
        ("float32 is not", lambda x: x.astype(jnp.float32)),
        ("head size 48", lambda x: x[..., :48]),
        ("no queries", lambda x: x[:, :0]),
    ):
        assert reason in pallas_gpu.sink_attention_mosaic_gpu_unsupported(change(q), change(k))
