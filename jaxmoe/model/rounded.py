# SPDX-License-Identifier: Apache-2.0
"""Experts that are rounded to four bits wherever they are read, and train unrounded.

    packed = round_experts(params)             what engines read and exports write
    with_rounded(params, packed)               what the trainer's forward reads (rl/scorer.py)

The optimizer's weights are the masters. Every forward of a run reads the packed values of them, so
that the weights that are sampled, trained and shipped are the same.
Next: jaxmoe/model/moe/experts.py, whose matmuls take such matrices.
"""

from collections.abc import Callable
from functools import partial

from jax.typing import DTypeLike

from jaxmoe.config import Config, describe_engine
from jaxmoe.shapes import Params
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import (
    choose_ocp_exponent,
    encode_mxfp4,
    round_to_nearest,
)
from pallas_kernels.grouped_matmul.mxfp4_scales import choose_least_error_exponent
from pallas_kernels.grouped_matmul.mxfp4_stochastic import round_stochastically

MATRICES = ("w_gate_up", "w_down")


def round_experts(params: Params) -> Params:
    """Return the same weights with the experts' matrices in MXFP4; a critic has none and keeps all.

    Numerics: rounds as `encode_mxfp4`. Masters that are not finite become NaN.
    """
    return map_experts(encode_mxfp4, params)


def rounding_from_config(cfg: Config) -> Callable[[Params], Params] | None:
    """Return `round_experts` with the rules of `quant.scale` and `quant.rounding`; None if no
    expert is rounded."""
    if cfg.quant.experts == "none":
        return None
    exponents = {"ocp": choose_ocp_exponent, "least_error": choose_least_error_exponent}
    roundings = {"nearest": round_to_nearest, "stochastic": round_stochastically}
    encode = partial(
        encode_mxfp4,
        choose_exponent=exponents[cfg.quant.scale],
        round_magnitude=roundings[cfg.quant.rounding],
    )
    return partial(map_experts, encode)


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
    return rounding_from_config(cfg) if cfg.quant.trains_rounded else None


def engine_only_rounding(cfg: Config) -> Callable[[Params], Params] | None:
    """Return the function to an engine's values of the trainer's weights; None: the same."""
    is_same = cfg.quant.experts == "none" or cfg.quant.trains_rounded
    return None if is_same else partial(decode_rounded, cfg=cfg)


def decode_trained(params: Params, cfg: Config) -> Params:
    """Return dense weights with the values that a run's trainer reads."""
    return params if trainer_rounding(cfg) is None else decode_rounded(params, cfg)


def map_experts(fn, params: Params, *parallel: Params) -> Params:
    """Map fn over the experts' matrices; all other parameters are those of `params`."""
    layers = {
        kind: layer
        | {
            name: fn(layer[name], *(tree["layers"][kind][name] for tree in parallel))
            for name in MATRICES
            if layer.get(name) is not None
        }
        for kind, layer in params["layers"].items()
    }
    return params | {"layers": layers}
