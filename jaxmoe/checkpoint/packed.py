# SPDX-License-Identifier: Apache-2.0
"""Pack dense experts into four bits, and measure the error.

Training on packed weights starts from the released bytes or from the result of this module.
Next: jaxmoe/checkpoint/mxfp4.py, the format; hf.py loads and exports packed leaves.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.entries import Entry, leaf_of, list_entries
from jaxmoe.checkpoint.headers import check_packable
from jaxmoe.checkpoint.hf import check_param_tree, gather_entry
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.params import Spec, param_specs
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


class PackingError(NamedTuple):
    """The error of packing one layer's matrices of all experts."""

    relative: float  # ‖packed − dense‖ / ‖dense‖, Frobenius; 0 if both are 0
    largest: float  # max |packed − dense|, in the unit of the weights


def pack_experts(params: Params, cfg: ModelConfig) -> tuple[Params, dict[str, PackingError]]:
    """The same weights with the experts' two matrices in MXFP4, and the error of each.

    A matrix that is packed already, such as one without an adapter, is left as it is, and has no
    error. Packed leaves are numpy arrays on the host, all others the same objects as in `params`;
    errors are by the matrix's name in a checkpoint. Memory in addition to the result: one layer's
    matrices.
    Numerics: rounds as `mxfp4.encode_blocks`; values that MXFP4 can represent have error 0. The
    sums of the errors are float64.
    Raises: ConfigError if D is not a multiple of 64 or a value is not finite; ValueError if params
        are not those of this model.
    """
    check_packable(cfg)
    check_param_tree(params, cfg)
    specs = param_specs(cfg)
    packed = jax.tree.map(
        _init_packed_leaf, specs, params, is_leaf=lambda leaf: isinstance(leaf, Spec)
    )
    errors: dict[str, PackingError] = {}
    for entry in list_entries(cfg):
        if entry.is_packable:
            if isinstance(leaf_of(params, entry), Mxfp4):
                continue
            errors[entry.name] = _pack_into(
                leaf_of(packed, entry), gather_entry(params, entry), entry
            )
    return packed, errors


def format_packing_errors(errors: Mapping[str, PackingError]) -> str:
    """One line for the terminal: the mean error, and the names of the two largest errors."""
    relative = max(errors, key=lambda name: errors[name].relative)
    largest = max(errors, key=lambda name: errors[name].largest)
    mean = sum(error.relative for error in errors.values()) / len(errors)
    return (
        f"packed {len(errors)} expert matrices into MXFP4: mean relative error {mean:.2%}, "
        f"at most {errors[relative].relative:.2%} ({relative}); largest "
        f"{errors[largest].largest:.3g} ({largest})"
    )


def _init_packed_leaf(spec: Spec, leaf: Leaf) -> Leaf:
    is_dense = spec.is_packable and not isinstance(leaf, Mxfp4)
    return mxfp4.init_packed(spec.shape) if is_dense else leaf


def _pack_into(leaf: Leaf, dense: np.ndarray, entry: Entry) -> PackingError:
    """Pack one layer's experts into a leaf, one at a time; returns the error."""
    halves = jax.tree.map(lambda part: part[entry.index], leaf)
    error_sq, weight_sq, largest = 0.0, 0.0, 0.0
    for e, matrix in enumerate(dense):
        w_DF = matrix.astype(np.float32)
        if not np.isfinite(w_DF).all():
            raise ConfigError(f"{entry.name} must be finite to be packed; expert {e} is not.")
        packed = mxfp4.blocks_to_halves(*mxfp4.encode_blocks(w_DF.T))
        for half, part in zip(halves.codes, packed.codes, strict=True):
            half[e] = part
        error = np.abs(mxfp4.decode_packed(packed).astype(np.float32) - w_DF)
        error_sq += float(np.square(error, dtype=np.float64).sum())
        weight_sq += float(np.square(w_DF, dtype=np.float64).sum())
        largest = max(largest, float(error.max()))
    return PackingError((error_sq / weight_sq) ** 0.5 if error_sq else 0.0, largest)
