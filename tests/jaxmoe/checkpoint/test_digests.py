# SPDX-License-Identifier: Apache-2.0
"""The digest of an array sees every flip, and does not care how the array was cut."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.checkpoint import digests
from jaxmoe.checkpoint.digests import array_digests, json_digest, partial_digest

DTYPES = [np.uint8, ml_dtypes.bfloat16, np.float32, np.int32]


def random_array(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 5, 4), (0, 3), (3, 0)])
def test_the_digest_is_the_sum_in_its_docstring(shape, dtype, monkeypatch):
    array = random_array(shape, dtype)
    words = array.reshape(-1).view(f"u{array.itemsize}").tolist()
    want = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    assert array_digests({"a": {"b": array}}) == {"a/b": f"{want:016x}"}
    monkeypatch.setattr(digests, "_CHUNK_ELEMENTS", 8)
    assert array_digests({"x": jnp.asarray(array)}) == {"x": f"{want:016x}"}


@pytest.mark.parametrize("cuts", [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 5), (4, 3, 5)])
def test_digests_of_an_arrays_parts_sum_to_it(cuts):
    array = random_array((4, 6, 10), np.float32)
    total = 0
    for part_index in itertools.product(*(range(n) for n in cuts)):
        sizes = [full_size // n for full_size, n in zip(array.shape, cuts, strict=True)]
        start = tuple(i * size for i, size in zip(part_index, sizes, strict=True))
        box = tuple(slice(s, s + size) for s, size in zip(start, sizes, strict=True))
        total += partial_digest(array[box], start, array.shape)
    assert f"{total % 2**64:016x}" == array_digests({"x": array})["x"]


def test_shards_on_four_devices_have_one_digest():
    x = random_array((4, 6, 10), np.float32)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    for spec in [P(), P("a"), P(None, "b"), P("a", None, "b")]:
        cut = jax.device_put(x, NamedSharding(mesh, spec))
        assert array_digests({"x": cut}) == array_digests({"x": x}), spec


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flip_of_two_bits_is_detected(dtype):
    array = random_array((3, 2), dtype, seed=1)
    bits = 8 * array.nbytes
    digests = {array_digests({"x": array})["x"]}
    for flips in itertools.chain(((i,) for i in range(bits)), pairs(bits)):
        raw = array.copy()
        for bit in flips:
            raw.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        digest = f"{partial_digest(raw, (0, 0), (3, 2)):016x}"
        assert digest not in digests, flips


def pairs(bits):
    """Pairs that are most likely to cancel: the same bit in two bytes, and neighbours."""
    for i in range(bits):
        yield from ((i, j) for j in range(i + 8, bits, 8))
        yield from [(i, i + 1)] if i + 1 < bits else []


def test_json_values_have_one_digest_in_any_order():
    assert json_digest({"a": [1, 2.5], "b": None}) == json_digest({"b": None, "a": (1, 2.5)})
    assert json_digest({"a": 1}) != json_digest({"a": 2})
