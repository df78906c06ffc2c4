# SPDX-License-Identifier: Apache-2.0
"""Experts that are rounded to four bits wherever they are read, and train unrounded.

    packed = round_experts(params)             what engines read and exports write
    params = with_rounded(params, packed)      what the trainer's forward reads

The optimizer's weights are the masters. Every forward of a run reads the packed values of them, so
that the weights that are sampled, trained and shipped are the same.
Next: jaxmoe/model/experts.py reads a `Rounded` matrix.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxmoe.config import Config, describe_engine
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import Mxfp4, Mxfp4Part
from pallas_kernels.grouped_matmul.mxfp4 import (
    GROUP,
    mxfp4_to_dense,
    mxfp4_to_float32_bits,
)
from pallas_kernels.grouped_matmul.mxfp4_encode import (
    choose_ocp_exponent,
    encode_mxfp4,
    round_to_nearest,
)
from pallas_kernels.grouped_matmul.mxfp4_scales import choose_least_error_exponent
from pallas_kernels.grouped_matmul.mxfp4_stochastic import round_stochastically

MATRICES = ("w_gate_up", "w_down")
LARGEST_CODE = 7  # the value 6


@struct.dataclass
class Rounded:
    """The matrices of a layer's experts in four bits, and their masters, which get the gradient."""

    packed: Leaf  # Mxfp4, or a Mxfp4Part of it
    master: Leaf  # [*, E, D, F]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.master.shape


def round_experts(params: Params, encode: Callable[[Array], Mxfp4] = encode_mxfp4) -> Params:
    """Return the same weights with the experts' matrices in MXFP4; a critic has none and keeps all.

    Numerics: rounds as `encode_mxfp4`. Masters that are not finite become NaN.
    """
    return map_experts(encode, params)


def encoder_from_config(cfg: Config) -> Callable[[Array], Mxfp4]:
    """Return `encode_mxfp4` with the rules of `quant.scale` and `quant.rounding`."""
    exponents = {"ocp": choose_ocp_exponent, "least_error": choose_least_error_exponent}
    roundings = {"nearest": round_to_nearest, "stochastic": round_stochastically}
    return partial(
        encode_mxfp4, choose_exponent=exponents[cfg.quant.scale],
        round_magnitude=roundings[cfg.quant.rounding],
    )  # fmt: skip


def rounding_from_config(cfg: Config) -> Callable[[Params], Params] | None:
    """Return `round_experts` with the rules of the config; None if no expert is rounded."""
    if cfg.quant.experts == "none":
        return None
    return partial(round_experts, encode=encoder_from_config(cfg))


def with_rounded(params: Params, packed: Params) -> Params:
    """Return the parameters that the trainer's forward reads: packed values, masters' gradients."""
    return map_experts(lambda master, values: Rounded(values, master), params, packed)


def decode_experts(params: Params, dtype: DTypeLike) -> Params:
    """Return the weights with dense experts of the same values; exact in float32 and bfloat16."""
    return map_experts(lambda packed: mxfp4_to_dense(packed, dtype), params)


def decode_rounded(params: Params, cfg: Config) -> Params:
    """Return dense weights with the values that a run's engine reads."""
    if (round_params := rounding_from_config(cfg)) is None:
        return params
    return decode_experts(round_params(params), cfg.model.dtype)


def engine_rounding(cfg: Config) -> Callable[[Params], Params] | None:
    """Return the function from a run's weights to those that its engine loads; None: the same.

    Engines that do not read four bits get the packed values in the model's dtype.
    """
    round_params = rounding_from_config(cfg)
    if round_params is None or describe_engine(cfg).reads_four_bits:
        return round_params
    return partial(decode_rounded, cfg=cfg)


def trainer_rounding(cfg: Config) -> Callable[[Params], Params] | None:
    """Return the function from a run's weights to those that the trainer reads; None: the same."""
    return rounding_from_config(cfg) if cfg.quant.experts == "mxfp4" else None


def read_rounded(w_EDF: Rounded, dtype: DTypeLike) -> Float[Array, "E D F"]:
    """Return the packed values of a layer's matrices; their gradient goes to the masters.

        dL/dmaster = dL/dvalue where |master| ≤ 6 · 2^e of its group, else 0

    The straight-through gradient: rounding counts as the identity, except where a value is above
    the largest code and a smaller change of the master changes nothing.
    """
    packed = w_EDF.packed
    if isinstance(packed, Mxfp4Part):
        n_experts = w_EDF.shape[0]
        packed = Mxfp4(
            *(lax.dynamic_slice_in_dim(x, packed.first, n_experts) for x in packed.stack)
        )
    return _straight_through(w_EDF.master, packed, jnp.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _straight_through(master_EDF: Array, packed: Mxfp4, dtype: jnp.dtype) -> Array:
    return mxfp4_to_dense(packed, dtype)


def _read_forward(master_EDF: Array, packed: Mxfp4, dtype: jnp.dtype) -> tuple[Array, Leaf]:
    return mxfp4_to_dense(packed, dtype), (master_EDF, packed)


def _read_backward(dtype: jnp.dtype, saved: Leaf, grad_EDF: Array) -> tuple[Array, Mxfp4]:
    master_EDF, packed = saved
    grad_EDF = jnp.where(is_saturated(master_EDF, packed.scales_EDF), 0, grad_EDF)
    no_grad: Leaf = [np.zeros(x.shape, jax.dtypes.float0) for x in packed]
    return grad_EDF.astype(master_EDF.dtype), Mxfp4(*no_grad)


_straight_through.defvjp(_read_forward, _read_backward)


def is_saturated(
    master_EDF: Float[Array, "*E D F"], scales_EDF: UInt8[Array, "*E D_32nd F"]
) -> Array:
    """True where a master is above the largest value of its group, 6 · 2^e."""
    return is_above_largest(master_EDF, jnp.repeat(scales_EDF, GROUP, axis=-2))


def is_above_largest(
    master_EDF: Float[Array, "*E D F"], scale_EDF: UInt8[Array, "*E D F"]
) -> Array:
    """True where a master is above the largest value of a group with this scale."""
    scale = scale_EDF.astype(jnp.int32)
    # Compared as bits, because a device may flush subnormals.
    largest = mxfp4_to_float32_bits(jnp.full_like(scale, LARGEST_CODE), scale)
    bits = lax.bitcast_convert_type(master_EDF.astype(jnp.float32), jnp.int32)
    return (bits & 0x7FFFFFFF) > largest


def map_experts(fn, params: Params, *parallel: Params) -> Params:
    """Map fn over the experts' matrices; all other parameters are those of `params`."""
    layers = {
        kind: layer | {
            name: fn(layer[name], *(tree["layers"][kind][name] for tree in parallel))
            for name in MATRICES if layer.get(name) is not None
        }
        for kind, layer in params["layers"].items()
    }  # fmt: skip
    return params | {"layers": layers}
