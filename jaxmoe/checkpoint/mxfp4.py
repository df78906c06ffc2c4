# SPDX-License-Identifier: Apache-2.0
"""MXFP4, the four-bit format of the released experts, in plain numpy.

Groups of 32 values share one power of two: blocks hold two FP4 E2M1 codes per byte, the earlier
value in the low half; scales hold E8M0, the exponent plus 127. Groups run along the dimension
that the matmul contracts, which is the last one in this module.
The kernels' format (`Mxfp4`) has the codes of rows d and d + D/2 in one byte instead;
`blocks_to_halves` and `halves_to_blocks` convert between the two.
Next: jaxmoe/checkpoint/hf.py reads and writes both with the rest of a checkpoint.
"""

from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float, UInt8

from jaxmoe.checkpoint.layouts import zeros_to_share
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

GROUP = 32  # values under one scale
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PAIRS = np.stack([_FP4[np.arange(256) & 15], _FP4[np.arange(256) >> 4]], axis=1)
# Both values of a byte are looked up as one word of 64 bits.
_PAIR_BITS = _PAIRS.view(np.uint64)[:, 0]
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def decode_blocks(
    blocks: UInt8[np.ndarray, "*R G 16"], scales: UInt8[np.ndarray, "*R G"], dtype: str = "float32"
) -> Float[np.ndarray, "*R D"]:
    """The values of packed groups: fp4(code) · 2^(scale − 127), D = 32·G.

    Numerics: exact in float32 and bfloat16; values beyond their range become infinite.
    Raises: ValueError for scale 255, which is NaN.
    Source: OCP Microscaling Formats (MX) 1.0, §5.3 and §6.3.
    """
    if scales.size and scales.max() == 255:
        raise ValueError("MXFP4 scales must be at most 254, got 255 (NaN). Fetch the file again.")
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    values = np.take(_PAIR_BITS, blocks).view(np.float32)  # [..., G, 32]
    with np.errstate(over="ignore"):
        values *= powers[..., None]
    return values.reshape(*scales.shape[:-1], -1).astype(_DTYPES[dtype], copy=False)


def encode_blocks(
    x: Float[np.ndarray, "*R D"],
) -> tuple[UInt8[np.ndarray, "*R G 16"], UInt8[np.ndarray, "*R G"]]:
    """Pack values in groups of 32: blocks and scales, with scale = floor(log2(max|x|)) − 2 + 127.

    Numerics: rounds to nearest, ties to even, and clips at ±6·2^e, where 2^e is the scale; so
    |error| ≤ max(|x|, 2^e) / 4, which is at most a quarter of a group's largest value (near 8·2^e)
    and at most a sixteenth of it for values below an eighth of it. Values from `decode_blocks`
    are encoded exactly. Values below 2^−127 · 0.5 become 0.
    Raises: ValueError if D is not a multiple of 32 or a value is not finite.
    Source: OCP Microscaling Formats (MX) 1.0, §6.3.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 needs a last dimension that is a multiple of 32, got {x.shape}.")
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    if not np.isfinite(largest).all():
        raise ValueError("MXFP4 needs finite values, got NaN or infinity.")
    # frexp's mantissa is in [1/2, 1), so its exponent is floor(log2) + 1.
    exponent = np.clip(np.frexp(largest)[1] - 3, -127, 127)
    size = np.abs(groups) * np.ldexp(np.float32(1), -exponent)[..., None]
    codes = np.signbit(groups).astype(np.uint8) << 3
    # Each midpoint that the value exceeds adds one to the code; ties go to the even code.
    for midpoint, up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        codes += np.greater_equal(size, midpoint) if up else np.greater(size, midpoint)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponent + 127).astype(np.uint8)


def init_packed(shape: tuple[int, ...]) -> Mxfp4:
    """Host arrays of zeros for packed matrices whose decoded shape is [*, D, F]."""
    *stack, summed, width = shape
    return _make_packed(
        *(zeros_to_share((*stack, summed // n, width), np.uint8) for n in (2, GROUP))
    )


def _make_packed(*parts: Any) -> Mxfp4:  # the type declares jax arrays; these are numpy arrays
    return Mxfp4(*parts)


def blocks_to_halves(
    blocks: UInt8[np.ndarray, "F G 16"], scales: UInt8[np.ndarray, "F G"]
) -> Mxfp4:
    """Rearrange one matrix's blocks and scales into `Mxfp4`, [D/2, F] and [G, F].

    The codes do not change. D = 32·G must be a multiple of 64, so that each half of the rows
    consists of complete groups.
    """
    columns = len(blocks)
    return _make_packed(_pair_halves(blocks.reshape(columns, 2, -1).transpose(1, 2, 0)), scales.T)


def halves_to_blocks(
    nibbles: UInt8[np.ndarray, "D_half F"], scales: UInt8[np.ndarray, "G F"]
) -> tuple[UInt8[np.ndarray, "F G 16"], UInt8[np.ndarray, "F G"]]:
    """The inverse of `blocks_to_halves`."""
    return nibbles_to_blocks(nibbles), np.ascontiguousarray(scales.T)


def nibbles_to_blocks(nibbles: UInt8[np.ndarray, "D_half F"]) -> UInt8[np.ndarray, "F G 16"]:
    """The blocks of one matrix."""
    half, columns = nibbles.shape
    bytes_2DF = _unpair_halves(nibbles).reshape(2, half // 2, columns)
    return np.ascontiguousarray(bytes_2DF.transpose(2, 0, 1)).reshape(columns, -1, GROUP // 2)


def _pair_halves(low_high: np.ndarray) -> np.ndarray:
    """Convert bytes of rows (2i, 2i + 1), [2, D/4, F], to bytes of rows (d, d + D/2), [D/2, F]."""
    low, high = low_high
    out = np.empty((2 * len(low), low.shape[1]), np.uint8)
    out[0::2] = (low & 15) | (high << 4)
    out[1::2] = (low >> 4) | (high & 240)
    return out


def _unpair_halves(nibbles: np.ndarray) -> np.ndarray:
    even_rows, odd_rows = nibbles[0::2], nibbles[1::2]
    return np.stack([(even_rows & 15) | (odd_rows << 4), (even_rows >> 4) | (odd_rows & 240)])


def decode_packed(packed: Mxfp4) -> BFloat16[np.ndarray, "*E D F"]:
    """The dense matrices of a packed host leaf; exact, infinite beyond the range of bfloat16."""
    out = np.empty(packed.shape, _DTYPES["bfloat16"])
    *stack, half, _ = packed.nibbles_EDF.shape
    for index in np.ndindex(*stack):
        nibbles, scales = packed.nibbles_EDF[index], packed.scales_EDF[index]
        powers = np.repeat(np.ldexp(np.float32(1), scales.astype(np.int32) - 127), GROUP, axis=0)
        with np.errstate(over="ignore"):
            out[index][:half] = np.take(_FP4, nibbles & 15) * powers[:half]
            out[index][half:] = np.take(_FP4, nibbles >> 4) * powers[half:]
    return out


def count_infinite(blocks: UInt8[np.ndarray, "*R 16"], scales: UInt8[np.ndarray, "*R"]) -> int:
    """Number of values beyond the range of float32 and bfloat16: 4 · 2^126 and more."""
    rows = scales >= 253
    if not rows.any():
        return 0
    with np.errstate(over="ignore"):
        return int(
            np.count_nonzero(np.isinf(decode_blocks(blocks[rows][:, None], scales[rows][:, None])))
        )
