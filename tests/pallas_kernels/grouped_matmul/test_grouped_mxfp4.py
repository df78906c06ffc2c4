# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights in our order, and the SwiGLU of plain XLA: bit for bit what they replace."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import mxfp4 as released
from pallas_kernels.grouped_matmul import cases, grouped_matmul, grouped_swiglu, mxfp4, xla
from tests.pallas_kernels.grouped_matmul.released import pack_released

E, D, F = 3, 192, 40


def random_release(seed=0, highest=255, depth=D):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (E, F, depth // 32, 16), np.uint8)
    return blocks, rng.integers(0, highest, (E, F, depth // 32), np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_code_and_scale_decodes_as_released(dtype):
    blocks = np.broadcast_to(np.arange(16, dtype=np.uint8) * 0x11, (1, 255, 2, 16))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[None, :, None], 2, axis=2)
    word = {"float32": np.uint32, "bfloat16": np.uint16}[dtype]
    for packed in ((blocks, scales), random_release()):
        actual = mxfp4.mxfp4_to_dense(pack_released(*map(jnp.asarray, packed)), dtype)
        expected = released.decode_blocks(*packed, dtype=dtype).swapaxes(1, 2)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(actual).view(word), expected.view(word))


def test_a_byte_holds_rows_half_apart():
    blocks, scales = random_release()
    x = pack_released(jnp.asarray(blocks), jnp.asarray(scales))
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(E, F, D)
    assert x.shape == (E, D, F) and x.nibbles_EDF.shape == (E, D // 2, F)
    assert x.nibbles_EDF[1, 5, 7] == codes[1, 7, 5] | codes[1, 7, 5 + D // 2] << 4
    assert x.scales_EDF[1, 4, 7] == scales[1, 7, 4]


def test_a_nan_scale_stays_nan():
    x = mxfp4.Mxfp4(jnp.zeros((1, 32, 1), jnp.uint8), jnp.full((1, 2, 1), 255, jnp.uint8))
    assert np.isnan(mxfp4.mxfp4_to_dense(x)).all()


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize(
    "op, depth",
    # Of 96 rows each half of a byte has one group and a half.
    [(grouped_matmul, D), (grouped_swiglu, D), (grouped_matmul, 96)],
)
def test_four_bit_products_equal_decoded_products(op, depth, impl):
    case = cases.MatmulCase("", 61, depth, F, (29, 0, 23))
    lhs, _, sizes, bias = cases.init_matmul_inputs(case)
    release = random_release(highest=128, depth=depth)
    packed = pack_released(*map(jnp.asarray, release))
    values = mxfp4.mxfp4_to_dense(packed)

    def run(rhs, lhs, bias):
        return op(lhs, rhs, sizes, bias_EF=bias, impl=impl)

    actual, pull = jax.vjp(partial(run, packed), lhs, bias)
    want, pull_decoded = jax.vjp(partial(run, values), lhs, bias)
    np.testing.assert_array_equal(actual, want)
    for a, b in zip(pull(actual), pull_decoded(actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_one_four_bit_matrix_is_decoded_at_once():
    lhs, _, sizes, bias = cases.init_matmul_inputs(cases.MatmulCase("", 16, D, F, (7, 0, 9)))
    packed = pack_released(*map(jnp.asarray, random_release()))
    text = str(jax.make_jaxpr(xla.grouped_matmul_xla)(lhs, packed, sizes, bias))
    assert f"f32[{D},{F}]" in text and f"f32[{E},{D},{F}]" not in text


def test_a_four_bit_weight_has_no_gradient():
    lhs, _, sizes, _ = cases.init_matmul_inputs(cases.MatmulCase("", 16, D, F, (7, 0, 9)))
    packed = pack_released(*map(jnp.asarray, random_release(highest=128)))
    _, pull = jax.vjp(lambda rhs: grouped_matmul(lhs, rhs, sizes, impl="xla"), packed)
    (drhs,) = pull(jnp.ones((16, F)))
    assert {x.dtype for x in jax.tree.leaves(drhs)} == {jax.dtypes.float0}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_swiglu_of_xla_activates_the_rounded_product(dtype):
    """Values and gradients, every bit: trained runs depend on the order of its roundings."""
    case = cases.TEST_CASES[0]
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(case, dtype)
    lhs = lhs * 4
    dout = jax.random.normal(jax.random.key(4), (case.M, case.F // 2)).astype(dtype)

    def unfused(lhs, rhs, bias):
        h = grouped_matmul(lhs, rhs, sizes, bias_EF=bias, impl="xla")
        gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return ((up + 1.0) * gate * (1.0 / (1.0 + jnp.exp(-1.702 * gate)))).astype(h.dtype)

    def fused(lhs, rhs, bias):
        return grouped_swiglu(lhs, rhs, sizes, bias_EF=bias, impl="xla")

    @partial(jax.jit, static_argnums=0)
    def run(f, *args):
        out, pull = jax.vjp(f, *args)
        return out, *pull(dout)

    for a, b in zip(run(fused, lhs, rhs, bias), run(unfused, lhs, rhs, bias), strict=True):
        np.testing.assert_array_equal(a, b)


def test_misshaped_four_bit_weights_are_named():
    raw, raw_swiglu = inspect.unwrap(grouped_matmul), inspect.unwrap(grouped_swiglu)
    blocks, scales = map(jnp.asarray, random_release())
    lhs, rhs, sizes, _ = cases.init_matmul_inputs(cases.MatmulCase("", 16, D, F, (7, 0, 9)))
    packed = pack_released(blocks, scales)
    with pytest.raises(ValueError, match="must have scales"):
        raw(lhs, packed._replace(scales_EDF=packed.scales_EDF[:, 1:]), sizes)
    with pytest.raises(ValueError, match="even number of columns"):
        raw_swiglu(lhs, rhs[:, :, 1:], sizes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("lowest", [0, 2], ids=["subnormals", "normal"])
def test_xla_decodes_every_code_and_scale_exactly(lowest, dtype):
    """Scales of subnormals take another way than those without."""
    nibbles = np.repeat(np.arange(16, dtype=np.uint8) * 0x11, 2)[:, None]
    scales = np.arange(lowest, 256)[None, :].astype(np.uint8)
    packed = mxfp4.Mxfp4(
        jnp.asarray(np.broadcast_to(nibbles, (1, 32, scales.size))),
        jnp.asarray(np.broadcast_to(scales, (1, 2, scales.size))),
    )
    decoded = jax.jit(lambda x: xla._decode(x, dtype, jnp.bool_(True)))(
        mxfp4.Mxfp4(packed.nibbles_EDF[0], packed.scales_EDF[0])
    )
    word = {2: np.uint16, 4: np.uint32}[decoded.dtype.itemsize]
    expected = mxfp4.mxfp4_to_dense(packed, dtype)[0]
    assert jnp.isnan(decoded[:, -1]).all() and jnp.isnan(expected[:, -1]).all()  # of any sign
    decoded, expected = (np.asarray(x[:, :-1]).view(word) for x in (decoded, expected))
    np.testing.assert_array_equal(decoded, expected)
