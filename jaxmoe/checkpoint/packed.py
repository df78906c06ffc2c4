# SPDX-License-Identifier: Apache-2.0
"""Dense experts into four bits, on request, with what that costs: training on packed weights
begins from the released bytes, or from these.

Next: jaxmoe/checkpoint/mxfp4.py, the format; hf.py loads and exports packed leaves.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.entries import Entry, entries, leaf_of
from jaxmoe.checkpoint.headers import require_packable
from jaxmoe.checkpoint.hf import check_params, gather_entry
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.params import Spec, param_specs
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


class PackingError(NamedTuple):
    """Of one layer's matrices, all experts: what four bits lost."""

    relative: float  # ‖packed − dense‖ / ‖dense‖, Frobenius; 0 where both are 0
    largest: float  # max |packed − dense|, in the weights' own unit


def pack_experts(params: Params, cfg: ModelConfig) -> tuple[Params, dict[str, PackingError]]:
    """The same weights with the experts' two matrices in MXFP4, and the error of each.

    Packed leaves are numpy arrays on the host, all others the same objects as in `params`; errors
    go by the matrix's name in a checkpoint. Memory: one layer's matrices beyond the result.
    Numerics: from the values as held, as `mxfp4.encode` rounds; what it can hold comes back
    exactly, with error 0. The sums of the errors are float64.
    Raises ConfigError where D is no multiple of 64, a value is not finite, or experts are packed
    already; ValueError where params are not this model's.
    """
    require_packable(cfg)
    check_params(params, cfg)
    specs = param_specs(cfg)
    packed = jax.tree.map(_room, specs, params, is_leaf=lambda leaf: isinstance(leaf, Spec))
    errors: dict[str, PackingError] = {}
    for entry in entries(cfg):
        if entry.is_packable:
            if isinstance(leaf_of(params, entry), Mxfp4):
                raise ConfigError(
                    f"{entry.name} must be dense to be packed, and is packed already."
                )
            errors[entry.name] = _pack_into(
                leaf_of(packed, entry), gather_entry(params, entry), entry
            )
    return packed, errors


def summary(errors: Mapping[str, PackingError]) -> str:
    """One line for the terminal: the error of all, and the two worst by name."""
    relative = max(errors, key=lambda name: errors[name].relative)
    largest = max(errors, key=lambda name: errors[name].largest)
    mean = sum(error.relative for error in errors.values()) / len(errors)
    return (
        f"packed {len(errors)} expert matrices into MXFP4: relative error {mean:.2%} in the mean, "
        f"at most {errors[relative].relative:.2%} ({relative}); largest "
        f"{errors[largest].largest:.3g} ({largest})"
    )


def _room(spec: Spec, leaf: Leaf) -> Leaf:
    return mxfp4.room(spec.shape) if spec.is_packable else leaf


def _pack_into(room: Leaf, dense: np.ndarray, entry: Entry) -> PackingError:
    """Fills one layer pair's room, an expert at a time."""
    ours = jax.tree.map(lambda part: part[entry.pair], room)
    lost, whole, largest = 0.0, 0.0, 0.0
    for e, matrix in enumerate(dense):
        w_DF = matrix.astype(np.float32)
        if not np.isfinite(w_DF).all():
            raise ConfigError(f"{entry.name} must be finite to be packed; expert {e} is not.")
        packed = mxfp4.halved(*mxfp4.encode(w_DF.T))
        for mine, part in zip(ours, packed, strict=True):
            mine[e] = part
        error = np.abs(mxfp4.decoded(packed).astype(np.float32) - w_DF)
        lost += float(np.square(error, dtype=np.float64).sum())
        whole += float(np.square(w_DF, dtype=np.float64).sum())
        largest = max(largest, float(error.max()))
    return PackingError((lost / whole) ** 0.5 if lost else 0.0, largest)
