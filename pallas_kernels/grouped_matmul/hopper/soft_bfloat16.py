# SPDX-License-Identifier: Apache-2.0
"""bfloat16 arithmetic as a GPU does it, in integers, for the interpreter: its CPU flushes
subnormals to 0. Names are those of jax.numpy. Next: mxfp4_decode.py, which uses it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int32

Number = BFloat16[Array, "..."]

_SIGN, _INFINITE, _NAN = 0x8000, 0x7F80, 0x7FC0


def multiply(a: Number, b: Number) -> Number:
    """a · b, rounded to nearest, ties to even."""
    x, y = _to_words(a), _to_words(b)
    sign, x, y = (x ^ y) & _SIGN, x & ~_SIGN, y & ~_SIGN
    product, field = (
        _mantissa_bits(x) * _mantissa_bits(y),
        _exponent_field(x) + _exponent_field(y) - 126,
    )
    shift = lax.clz(product) - 16  # the top bit to bit 15
    product, field = product << jnp.clip(shift, 0, 15), field - shift
    drop = jnp.clip(8 + jnp.maximum(1 - field, 0), 8, 24)  # a subnormal has fewer bits
    quotient, remainder = product >> drop, product & ((1 << drop) - 1)
    half = 1 << (drop - 1)
    quotient += ((remainder > half) | ((remainder == half) & (quotient % 2 == 1))).astype(jnp.int32)
    word = jnp.minimum(((jnp.maximum(field, 1) - 1) << 7) + quotient, _INFINITE)
    word = jnp.where(product == 0, 0, word)
    largest = jnp.maximum(x, y)
    word = jnp.where(largest == _INFINITE, _INFINITE, word)
    undefined = (largest > _INFINITE) | ((largest == _INFINITE) & (jnp.minimum(x, y) == 0))
    return _from_words(jnp.where(undefined, _NAN, sign | word))


def add(a: Number, zero: Number) -> Number:
    """a + zero, where `zero` is +0 or NaN."""
    x, y = _to_words(a), _to_words(zero)
    word = jnp.where(x == _SIGN, 0, x)  # −0 + 0
    return _from_words(jnp.where(y & ~_SIGN > _INFINITE, _NAN, word))


def maximum(a: Number, b: Number) -> Number:
    """The larger of two numbers that are neither negative nor NaN."""
    return _from_words(jnp.maximum(_to_words(a), _to_words(b)))


def _to_words(x: Number) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)


def _from_words(word: Int32[Array, "..."]) -> Number:
    return lax.bitcast_convert_type(word.astype(jnp.uint16), jnp.bfloat16)


def _exponent_field(x: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """The biased exponent; a subnormal has that of the smallest normal number."""
    return jnp.maximum(x >> 7, 1)


def _mantissa_bits(x: Int32[Array, "..."]) -> Int32[Array, "..."]:
    return jnp.where(x >> 7 > 0, 128, 0) | (x & 127)
