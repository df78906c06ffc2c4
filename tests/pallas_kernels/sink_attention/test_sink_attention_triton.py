# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, called from JAX.

The interpreter is chosen when triton is imported, so these tests skip in a process that imported
it before without TRITON_INTERPRET=1. It computes with numpy, so that no torch is needed.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import block_ranges
from pallas_kernels.sink_attention import cases, reference
from pallas_kernels.sink_attention.triton_kernels import jax_triton_call, triton_launch
from pallas_kernels.sink_attention.triton_kernels.triton_launch import TritonTiles
from tests.pallas_kernels.sink_attention import attention_oracle as oracle
from tests.pallas_kernels.sink_attention import triton_interpreted

if triton_interpreted.missing():
    pytest.skip(triton_interpreted.missing(), allow_module_level=True)


@pytest.fixture(scope="module")
def kernels():
    with triton_interpreted.interpreted() as module:
        yield module


@pytest.fixture
def attend(kernels, monkeypatch):
    return triton_interpreted.from_jax(kernels, monkeypatch)


# All but the last share their sizes: compiling is what these tests cost.
QUICK = [
    cases.get_attention_case(x)
    for x in ("packed", "left_padded", "big_sinks", "no_sinks", "decode_ring")
]
SLOW = [case for case in cases.TEST_CASES if case not in QUICK]


@pytest.mark.parametrize(
    "case, dtype",
    [(case, jnp.float32) for case in QUICK]
    + [(cases.get_attention_case("packed"), jnp.bfloat16)]
    + [pytest.param(case, jnp.float32, marks=pytest.mark.slow) for case in SLOW]
    + [
        pytest.param(cases.get_attention_case(name), dtype, marks=pytest.mark.slow)
        for name in ("gqa8", "right_padded", "many_blocks_packed")
        for dtype in (jnp.bfloat16, jnp.float16)
    ],
    ids=lambda x: x.name if isinstance(x, cases.AttentionCase) else x.__name__,
)
def test_values_and_gradients_match_the_plain_formula(attend, case, dtype):
    inputs, ct = cases.init_attention_inputs(case, dtype), oracle.cotangents(case, dtype)
    actual = oracle.values_and_gradients(attend, case.window, *ct, *inputs)
    assert [x.dtype for x in actual] == [dtype, jnp.float32, dtype, dtype, dtype, jnp.float32]
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in actual[2:])
    oracle.compare(case, actual, inputs, ct)


def test_no_keys_and_no_queries_are_allowed(attend):
    oracle.check_empty(attend, head_size=16)


def test_any_scale_is_taken(attend):
    case = cases.get_attention_case("tiny_distinct")
    inputs = cases.init_attention_inputs(case)
    for scale in (-0.3, 0.0):
        kernel_fn = jax_triton_call.sink_attention_triton(*inputs.arguments, case.window, scale)
        oracle_fn = reference.sink_attention_reference(*inputs.arguments, case.window, scale)
        for x, y in zip(kernel_fn, oracle_fn, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_the_package_is_imported_without_triton():
    program = (
        "import sys; sys.modules['triton'] = sys.modules['torch'] = None\n"
        "from pallas_kernels.sink_attention import sink_attention\n"
        "from pallas_kernels.sink_attention.triton_kernels import jax_triton_call\n"
        "assert 'jax_triton' not in sys.modules"
    )
    root = Path(cases.__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


def test_what_cannot_run_is_named(monkeypatch):
    def sizes(H, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, 2, 4, H), dtype), jax.ShapeDtypeStruct((1, 2, 2, H), dtype)

    monkeypatch.setattr(triton_launch, "find_spec", lambda name: name)
    assert jax_triton_call.sink_attention_triton_unsupported(*sizes(64)) is None
    assert "head size 48 is not one of" in jax_triton_call.sink_attention_triton_unsupported(
        *sizes(48)
    )
    assert "float64" in jax_triton_call.sink_attention_triton_unsupported(
        *sizes(64, np.dtype("float64"))
    )
    monkeypatch.setattr(triton_launch, "find_spec", lambda name: None)
    assert "pip install jax-triton" in jax_triton_call.sink_attention_triton_unsupported(*sizes(64))


PAST = 38  # tokens of the sequence whose prefill and decode are compared


def sequence(seed, rows=1):
    """Queries, keys and values of a sequence, and sinks; 2 key heads of 3 heads each."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((rows, PAST, 6, 16), (rows, PAST, 2, 16), (rows, PAST, 2, 16))
    return *map(jax.random.normal, keys[:3], shapes), 2 * jax.random.normal(keys[3], (6,))


def extended(attend, window, q, k, v, sink, start, room):
    """o and lse of the queries from `start` on, keys in a cache with room left over."""
    B, T, S = len(q), q.shape[1] - start, q.shape[1] + room
    k, v = (jnp.pad(x, ((0, 0), (0, room), (0, 0), (0, 0)), constant_values=3.0) for x in (k, v))
    slots = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    filled = (slots < q.shape[1]).astype(np.int32)
    places = (slots[:, start : start + T], slots, filled[:, start : start + T], filled)
    return attend(window, q[:, start:], k, v, sink, *map(jnp.asarray, places))


@pytest.fixture
def tables(attend, monkeypatch):
    """Tiles so small that 38 tokens take four, and what the tables of blocks were."""
    recorded = []

    def remember(needed, full):
        recorded.append((np.asarray(needed), np.asarray(full)))
        return block_ranges(needed, full)

    monkeypatch.setattr(triton_launch, "triton_forward_tiles", lambda *_: TritonTiles(32, 8, 4, 1))
    monkeypatch.setattr(jax_triton_call, "block_ranges", remember)
    return recorded


@pytest.mark.parametrize("window", [0, 9])
def test_prefill_chunks_and_decode_have_equal_bits(attend, tables, window):
    q, k, v, sink = sequence(0)
    full = extended(attend, window, q, k, v, sink, 0, 0)
    assert tables[0][1].any() == (window == 0)  # blocks without a mask; a decode step has none
    for end, start in ((PAST, 20), (PAST, 37), (30, 29), (17, 16), (1, 0)):
        past, room = (x[:, :end] for x in (q, k, v)), 58 - end
        part = extended(attend, window, *past, sink, start, room)
        for name, a, b in zip(("o", "lse"), full, part, strict=True):
            np.testing.assert_array_equal(a[:, start:end], b, err_msg=f"{name} {end} {start}")


def test_a_tokens_bits_ignore_the_batch(attend):
    single, two = sequence(0), sequence(1, 2)
    pair = [jnp.concatenate([b, a]) for a, b in zip(single[:3], two[:3], strict=True)]
    single_row, among = (extended(attend, 9, *x[:3], single[3], 30, 20) for x in (single, pair))
    for a, b in zip(single_row, among, strict=True):
        np.testing.assert_array_equal(a[0], b[2])


def test_visiting_an_unseen_block_changes_no_bit(attend, tables, monkeypatch):
    """Nor does masking a block that everybody sees whole."""
    q, k, v, sink = sequence(2)
    expected = extended(attend, 30, q, k, v, sink, 0, 20)

    def every_block(needed, _):
        m = needed.shape[2]
        return jnp.broadcast_to(jnp.array([0, m, m, m], jnp.int32), (*needed.shape[:2], 4))

    monkeypatch.setattr(jax_triton_call, "block_ranges", every_block)
    actual = extended(attend, 30, q, k, v, sink, 0, 20)
    assert not tables[0][0].all() and tables[0][1].any()
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(a, b)
