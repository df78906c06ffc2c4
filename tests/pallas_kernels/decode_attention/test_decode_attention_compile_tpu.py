# SPDX-License-Identifier: Apache-2.0
"""The TPU kernel of decoding through libtpu at the sizes of GPT-OSS 20B and 120B.

The compiler rejects kernels that exceed VMEM (16 MiB a kernel on v5e, the smallest): the ring
takes 3 MiB with heads of 64 and 6 MiB with heads of 128.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.decode_attention import cases, pallas_tpu
from pallas_kernels.masks import Layout
from tests.compilers import skip_without_compiler

pytestmark = pytest.mark.aot

EVERYWHERE = ("64x8k", "8x32k_new4")
SINGLE_CHIP = ("64_ring", "64x8k_window", "head_128")


def compiled(chip, case, flat):
    """Compile a case with the cache as [.., K·H], reshaped in the call, or as [.., K, H]."""
    skip_without_compiler(chip)
    q, kv, _, *other_inputs = cases.decode_shapes(case)
    inputs = jax.ShapeDtypeStruct((*kv.shape[:2], case.K * case.H), kv.dtype) if flat else kv

    def decode(q, k, v, *other_inputs):
        k, v = (x.reshape(kv.shape) for x in (k, v))
        return pallas_tpu.decode_attention_mosaic_tpu(
            q, k, v, *other_inputs, case.window, case.H**-0.5
        )

    return ahead_of_time.compile_for(chip, decode, q, inputs, inputs, *other_inputs), kv.size * 2


@pytest.mark.parametrize("chip", ahead_of_time.TPUS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_chip_compiles_without_copying_the_cache(chip, name):
    compiled_case, bytes_of_k = compiled(chip, cases.get_decode_case(name), flat=True)
    assert compiled_case.temp_bytes < 0.06 * bytes_of_k


@pytest.mark.parametrize("name", SINGLE_CHIP)
def test_other_sizes_compile_for_the_smallest_chip(name):
    compiled_case, bytes_of_k = compiled("v5e", cases.get_decode_case(name), flat=True)
    assert compiled_case.temp_bytes < 0.1 * bytes_of_k + 2**24


def test_many_new_tokens_of_wide_float32_heads_compile():
    skip_without_compiler("v5p")
    shape = jax.ShapeDtypeStruct
    q, kv = (shape((2, size, n, 128), jnp.float32) for size, n in ((16, 64), (512, 8)))
    assert pallas_tpu.decode_attention_mosaic_tpu_unsupported(q, kv) is None
    layout = Layout(*(shape((2, size), jnp.int32) for size in (16, 512, 16, 512)))
    args = q, kv, kv, shape((64,), jnp.float32), layout
    ahead_of_time.compile_for(
        "v5p", lambda *x: pallas_tpu.decode_attention_mosaic_tpu(*x, 0, 1.0), *args
    )


def test_a_cache_with_separate_heads_is_copied_first():
    compiled_case, bytes_of_k = compiled("v5e", cases.get_decode_case("64x8k"), flat=False)
    assert compiled_case.temp_bytes > 2 * bytes_of_k
