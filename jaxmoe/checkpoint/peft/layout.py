# SPDX-License-Identifier: Apache-2.0
"""Convert between our layout of adapter matrices and PEFT's names and layout.

Ours, for one layer: W' = W + scale · aᵀ b with a [(E,) R, in] and b [(E,) R, out]; gate and up are
halves of out. PEFT's, for a module: ΔW [out, in] = scale · B A, A [R, in], B [out, R]. PEFT treats
the experts of `transformers`' GptOss as parameters [E, in, out] (`target_parameters`) with
interleaved gate and up, and stacks all experts in two matrices: rows of A by expert, then rank;
columns of B by rank, then expert. The experts' axis that A spans depends on the version:

    "in"    PEFT to 0.18, and from 0.19.1 if the model sets `is_transposed` (transformers 5 does)
    "out"   PEFT 0.19.0, and from 0.19.1 if the model does not

In GPT-OSS, D = F, so the shapes of w_down do not show the axis; those of w_gate_up always do. We
write "in".
Source: PEFT's ParamWrapper (get_delta_weight), its pull request 3165.
Next: jaxmoe/checkpoint/peft/write.py reads and writes the files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from jaxmoe.checkpoint.entries import list_entries
from jaxmoe.config import ModelConfig

ExpertAxis = Literal["in", "out"]  # the experts' axis that A spans

ATTENTION = {f"w_{x}": f"self_attn.{x}_proj" for x in "qkvo"}
EXPERTS = {"w_gate_up": "mlp.experts.gate_up_proj", "w_down": "mlp.experts.down_proj"}
TARGETS = ATTENTION | EXPERTS  # matrices of a layer that can be adapted: our name -> PEFT's


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix of one layer of the base that can be adapted."""

    keys: tuple[str, str, str]  # path of its leaf: "layers", group, name
    index: int  # of the layer in the leaf
    target: str  # PEFT's name, such as "model.layers.3.self_attn.q_proj"
    inputs: int
    outputs: int
    experts: int | None  # None for attention

    @property
    def name(self) -> str:
        return self.keys[2]

    def peft_shapes(
        self, rank: int, axis: ExpertAxis = "in"
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """(shape of A, shape of B) in PEFT's layout."""
        stacked = rank * (self.experts or 1)
        first, second = (self.inputs, self.outputs)[:: 1 if axis == "in" else -1]
        return (stacked, first), (second, stacked)


def adapted_matrices(cfg: ModelConfig) -> list[AdaptedMatrix]:
    """All matrices that can be adapted, layer by layer."""
    matrices = []
    for entry in list_entries(cfg):
        if entry.index is not None and entry.keys[2] in TARGETS:
            *experts, inputs, outputs = entry.param_shape
            target = entry.name.removesuffix(".weight")
            kind, name = entry.keys[1:]
            matrices.append(
                AdaptedMatrix(
                    ("layers", kind, name),
                    entry.index,
                    target,
                    inputs,
                    outputs,
                    *(experts or [None]),
                )
            )
    return matrices


def module_of(matrix: AdaptedMatrix, adapted: Sequence[str]) -> str:
    """PEFT's name of the module that holds A and B of a matrix.

    adapted: our names of all adapted matrices. PEFT wraps a module with two adapted parameters
    twice: gate_up_proj is the inner wrapper.
    """
    if matrix.experts is None:
        return matrix.target
    is_inner = matrix.name == "w_gate_up" and "w_down" in adapted
    return matrix.target.rpartition(".")[0] + (".base_layer" if is_inner else "")


def tensor_of(matrix: AdaptedMatrix, letter: str, adapted: Sequence[str]) -> str:
    """Name of a matrix's A or B (`letter`) in the file."""
    return f"base_model.model.{module_of(matrix, adapted)}.lora_{letter}.weight"


def to_peft(
    matrix: AdaptedMatrix, a: Float[np.ndarray, "*E R D"], b: Float[np.ndarray, "*E R F"]
) -> tuple[Float[np.ndarray, "ER D"], Float[np.ndarray, "F ER"]]:
    """PEFT's A, which spans the inputs, and B."""
    if matrix.experts is None:
        return a, b.T
    if matrix.name == "w_gate_up":
        half = b.shape[-1] // 2
        b = np.stack([b[..., :half], b[..., half:]], -1).reshape(b.shape)
    return _stack_rows(a), _stack_columns(b)


def from_peft(
    matrix: AdaptedMatrix,
    axis: ExpertAxis,
    a: Float[np.ndarray, "ER _"],
    b: Float[np.ndarray, "_ ER"],
) -> tuple[Float[np.ndarray, "*E R D"], Float[np.ndarray, "*E R F"]]:
    """The inverse of `to_peft`, for an A that spans either axis of the experts."""
    if matrix.experts is None:
        return a, b.T
    n_experts = matrix.experts
    rows = a.reshape(n_experts, -1, a.shape[1])
    columns = b.reshape(b.shape[0], -1, n_experts).transpose(2, 1, 0)
    ours_a, ours_b = (rows, columns) if axis == "in" else (columns, rows)
    if matrix.name == "w_gate_up":
        ours_b = np.concatenate([ours_b[..., 0::2], ours_b[..., 1::2]], -1)
    return ours_a, ours_b


def _stack_rows(x: Float[np.ndarray, "E R D"]) -> Float[np.ndarray, "ER D"]:
    return x.reshape(-1, x.shape[-1])


def _stack_columns(x: Float[np.ndarray, "E R D"]) -> Float[np.ndarray, "D ER"]:
    return x.transpose(2, 1, 0).reshape(x.shape[-1], -1)
