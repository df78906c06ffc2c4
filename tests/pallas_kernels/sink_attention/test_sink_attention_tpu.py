# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels of sink attention, interpreted: values, every gradient, and what they skip."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases, pallas_tpu, pallas_tpu_backward
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from tests.pallas_kernels.sink_attention import attention_oracle as oracle

SMALL_BLOCKS = 16, 8, 8  # queries, keys, keys that a step may start at
PACKED = cases.get_attention_case(
    "packed"
)  # B=2 T=S=31 N=15 K=3 H=16 window 9; what runs on it compiles once
FAST = ("packed", "left_padded", "right_padded", "big_sinks", "no_sinks", "decode_ring")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "tpu_block_sizes", lambda *_: SMALL_BLOCKS)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(sizes, window, interpret, dout, dlse, q, k, v, sink, *places):
    assert sizes == blocks.tpu_block_sizes(0, 0, 0)

    def attend(*args):
        layout = Layout(*places)
        return pallas_tpu.sink_attention_mosaic_tpu(
            *args, layout, window, q.shape[3] ** -0.5, interpret
        )

    out, pull = jax.vjp(attend, q, k, v, sink)
    return *out, *pull((dout, dlse))


def run(window, dout, dlse, *inputs, interpret=True):
    return _run(blocks.tpu_block_sizes(0, 0, 0), window, interpret, dout, dlse, *inputs)


def compares(case, dtype):
    inputs, ct = cases.init_attention_inputs(case, dtype), oracle.cotangents(case, dtype)
    actual = run(case.window, *ct, *inputs)
    assert [x.dtype for x in actual] == [dtype, jnp.float32, dtype, dtype, dtype, jnp.float32]
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in actual[2:])
    oracle.compare(case, actual, inputs, ct)


@pytest.mark.parametrize("name", FAST)
def test_values_and_gradients_match_the_plain_formula(name):
    compares(cases.get_attention_case(name), jnp.float32)


def test_half_precision_matches_the_plain_formula():
    for name in ("packed", "big_sinks"):
        compares(cases.get_attention_case(name), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_every_case_matches_the_plain_formula(case, dtype):
    compares(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_every_case_in_the_blocks_of_the_chip(case, monkeypatch):
    monkeypatch.undo()
    compares(case, jnp.float32)


def finite(x_BTNH):
    return np.isfinite(x_BTNH).all((0, 2, 3))


def test_blocks_that_nobody_sees_are_skipped_not_masked():
    """NaN passes through a mask, in p·v and in dO·v: only what is skipped keeps it out."""
    case = PACKED._replace(layout="causal")  # window 9, blocks of 16 queries and 8 keys
    inputs, ct = cases.init_attention_inputs(case), oracle.cotangents(case)
    time = np.arange(case.T)

    def planted(name, mask):
        bad = jnp.where(jnp.asarray(mask)[None, :, None, None], jnp.nan, getattr(inputs, name))
        o, _, dq, dk, dv, _ = run(case.window, *ct, *inputs._replace(**{name: bad}))
        return finite(o), finite(dq), finite(dk), finite(dv)

    o, dq, dk, _ = planted("v_BSKH", time >= 16)  # later keys
    np.testing.assert_array_equal(o, time < 16)
    np.testing.assert_array_equal(dq, time < 16)
    o, dq, _, _ = planted("v_BSKH", time < 8)  # keys before the window of queries 16, 17, …
    np.testing.assert_array_equal(o, time >= 16)
    np.testing.assert_array_equal(dq, time >= 16)
    _, _, dk, dv = planted("q_BTNH", time >= 16)  # queries past the window of keys 0 to 7
    np.testing.assert_array_equal(dk, time < 8)
    np.testing.assert_array_equal(dv, time < 8)


def steps_of_two_blocks_in_parts(monkeypatch):
    monkeypatch.setattr(blocks, "tpu_block_sizes", lambda *_: (16, 16, 8))
    monkeypatch.setattr(pallas_tpu_backward, "max_keys_per_part", lambda _: 16)


@pytest.mark.parametrize(
    "parts", [False, pytest.param(True, marks=pytest.mark.slow, id="races-in-parts")]
)
def test_late_copies_change_nothing(parts, monkeypatch, capsys):
    """The chip's copies are asynchronous; here each is made when it is waited for, after NaN."""
    if parts:
        steps_of_two_blocks_in_parts(monkeypatch)
    case = cases.AttentionCase(
        "late", 1, 32, 40, 8, 2, 16, 0, "chunk"
    )  # some blocks are seen whole
    inputs, ct = cases.init_attention_inputs(case), oracle.cotangents(case)
    late_keys = pltpu.InterpretParams(
        dma_execution_mode="on_wait", uninitialized_memory="nan", detect_races=True
    )
    with pltpu.force_tpu_interpret_mode(late_keys):
        actual = run(case.window, *ct, *inputs, interpret=False)
        jax.block_until_ready(actual)
    assert "RACE DETECTED" not in capsys.readouterr().out  # the interpreter's words
    oracle.compare(case, actual, inputs, ct)


def test_keys_beyond_vmem_change_no_bit(monkeypatch):
    inputs, ct = (
        cases.init_attention_inputs(PACKED),
        oracle.cotangents(PACKED),
    )  # four blocks of keys
    full = run(PACKED.window, *ct, *inputs)
    part, parts = pallas_tpu_backward._gradients_of_part, []

    def counted(*args):
        parts.append(args)
        return part(*args)

    monkeypatch.setattr(pallas_tpu_backward, "_gradients_of_part", counted)
    monkeypatch.setattr(pallas_tpu_backward, "max_keys_per_part", lambda _: 9)  # one block of 8
    rerun = jax.jit(lambda *arrays: _run.__wrapped__(SMALL_BLOCKS, PACKED.window, True, *arrays))
    actual = rerun(*ct, *inputs)
    assert len(parts) == 4
    for name, single, split in zip(oracle.NAMES, full, actual, strict=True):
        np.testing.assert_array_equal(single, split, err_msg=name)


def test_steps_of_several_blocks_count_no_key_twice(monkeypatch):
    """A window's: they start at any block, and the last goes past the keys of its part."""
    steps_of_two_blocks_in_parts(monkeypatch)
    case = cases.AttentionCase("steps", 2, 37, 45, 6, 2, 16, 9)
    compares(case, jnp.float32)


@pytest.mark.parametrize("window, limit", [(128, 3 * 128), (0, 0.54 * 16384)])
def test_the_blocks_visited_grow_with_length_times_window(window, limit, monkeypatch):
    monkeypatch.undo()
    T = 16384
    x = blocks.choose_sizes((1, T, 64, 64), (1, T, 8, 64), window)
    place, single = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
    mask = jax.jit(blocks.block_layout, static_argnums=(0, 2))(
        x, Layout(place, place, single, single), window
    )
    runs = np.asarray(mask.q_runs)
    steps = -(-(runs[3::4] - runs[0::4]) // (x.bs // x.unit))
    visited = steps.sum() * x.bt * x.bs
    assert T * limit * 0.9 < visited <= T * limit


def test_what_the_kernels_cannot_take_is_said():
    def shapes(T=8, N=64, K=8, H=64, dtype=jnp.bfloat16, B=1):
        struct = jax.ShapeDtypeStruct
        return struct((B, T, N, H), dtype), struct((B, T, K, H), dtype)

    assert pallas_tpu.sink_attention_mosaic_tpu_unsupported(*shapes()) is None
    assert (
        pallas_tpu.sink_attention_mosaic_tpu_unsupported(*shapes(H=128, dtype=jnp.float32)) is None
    )
    for words, args in (
        ("head size 48", {"H": 48}),
        ("dtype float16", {"dtype": jnp.float16}),
        ("64 query heads per key head", {"K": 1}),
        ("of SMEM", {"T": 2**21}),
    ):
        assert words in pallas_tpu.sink_attention_mosaic_tpu_unsupported(*shapes(**args))
