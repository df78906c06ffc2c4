# SPDX-License-Identifier: Apache-2.0
"""Experts that are rounded to four bits wherever they are read, and train unrounded.

    packed = round_experts(params)             what engines read and exports write
    params = with_rounded(params, packed)      what the trainer's forward reads

The optimizer's weights are the masters. Every forward of a run reads the packed values of them, so
that the weights that are sampled, trained and shipped are the same.
Next: jaxmoe/model/experts.py, whose matmuls take `Rounded` matrices.
"""

from collections.abc import Callable
from functools import partial

from jax.typing import DTypeLike

from jaxmoe.config import Config, describe_engine
from jaxmoe.shapes import Params
from pallas_kernels.grouped_matmul import Rounded
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4

MATRICES = ("w_gate_up", "w_down")


def round_experts(params: Params) -> Params:
    """Return the same weights with the experts' matrices in MXFP4; a critic has none and keeps all.

    Numerics: rounds as `encode_mxfp4`. Masters that are not finite become NaN.
    """
    return _map_experts(encode_mxfp4, params)


def with_rounded(params: Params, packed: Params) -> Params:
    """Return the parameters that the trainer's forward reads: packed values, masters' gradients."""
    return _map_experts(lambda master, values: Rounded(values, master), params, packed)


def decode_experts(params: Params, dtype: DTypeLike) -> Params:
    """Return the weights with dense experts of the same values; exact in float32 and bfloat16."""
    return _map_experts(lambda packed: mxfp4_to_dense(packed, dtype), params)


def decode_rounded(params: Params, cfg: Config) -> Params:
    """Return dense weights with the values that a run's forwards read."""
    if cfg.quant.experts == "none":
        return params
    return decode_experts(round_experts(params), cfg.model.dtype)


def engine_rounding(cfg: Config) -> Callable[[Params], Params] | None:
    """Return the function from a run's weights to those that its engine loads; None: the same.

    Engines that do not read four bits get the packed values in the model's dtype.
    """
    if cfg.quant.experts == "none":
        return None
    if describe_engine(cfg).reads_four_bits:
        return round_experts
    return partial(decode_rounded, cfg=cfg)


def rounding_from_config(cfg: Config) -> Callable[[Params], Params] | None:
    """Return `round_experts` if the config rounds experts, else None."""
    return None if cfg.quant.experts == "none" else round_experts


def _map_experts(fn, params: Params, *parallel: Params) -> Params:
    """Map fn over the experts' matrices; all other parameters are those of `params`."""
    layers = {
        kind: layer | {
            name: fn(layer[name], *(tree["layers"][kind][name] for tree in parallel))
            for name in MATRICES if layer.get(name) is not None
        }
        for kind, layer in params["layers"].items()
    }  # fmt: skip
    return params | {"layers": layers}
