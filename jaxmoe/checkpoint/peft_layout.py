# SPDX-License-Identifier: Apache-2.0
"""Our adapters' matrices as PEFT names and lays them out, and back.

Ours, of one layer: W' = W + scale · aᵀ b with a [(E,) R, in] and b [(E,) R, out], gate and up as
halves of out. PEFT's, for a module: ΔW [out, in] = scale · B A, A [R, in], B [out, R]. It takes the
experts of `transformers`' GptOss as parameters [E, in, out] (`target_parameters`), gate and up in
turn, and stacks all of them in two matrices: rows of A by expert, then rank; columns of B by rank,
then expert. Which axis A is over has changed:

    "in"    PEFT to 0.18, and from 0.19.1 where the model says `is_transposed` (transformers 5 does)
    "out"   PEFT 0.19.0, and from 0.19.1 where the model does not say so

With GPT-OSS's D = F the shapes of w_down are no help; those of w_gate_up always are. We write "in".
Source: PEFT's ParamWrapper (get_delta_weight), its pull request 3165.
Next: jaxmoe/checkpoint/peft.py reads and writes the files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from jaxmoe.checkpoint.entries import entries
from jaxmoe.config import ModelConfig

Over = Literal["in", "out"]  # the experts' axis that A is over

ATTENTION = {f"w_{x}": f"self_attn.{x}_proj" for x in "qkvo"}
EXPERTS = {"w_gate_up": "mlp.experts.gate_up_proj", "w_down": "mlp.experts.down_proj"}
TARGETS = ATTENTION | EXPERTS  # what low-rank matrices may adapt, as PEFT calls it in a layer


@dataclass(frozen=True)
class AdaptedMatrix:
    """One layer's matrix of the base that may be adapted."""

    keys: tuple[str, str, str]  # of its leaf: "layers", "sliding" or "full", name
    pair: int  # where in the leaf
    target: str  # in PEFT's patterns, "model.layers.3.self_attn.q_proj"
    inputs: int
    outputs: int
    experts: int | None  # None of attention

    @property
    def name(self) -> str:
        return self.keys[2]

    def shapes(self, rank: int, over: Over = "in") -> tuple[tuple[int, int], tuple[int, int]]:
        """Of PEFT's A and B."""
        stacked = rank * (self.experts or 1)
        first, second = (self.inputs, self.outputs)[:: 1 if over == "in" else -1]
        return (stacked, first), (second, stacked)


def adapted_matrices(cfg: ModelConfig) -> list[AdaptedMatrix]:
    """All that an adapter may be of, layer by layer."""
    found = []
    for entry in entries(cfg):
        if entry.pair is not None and entry.keys[2] in TARGETS:
            *experts, inputs, outputs = entry.held
            target = entry.name.removesuffix(".weight")
            kind, name = entry.keys[1:]
            found.append(AdaptedMatrix(
                ("layers", kind, name), entry.pair, target, inputs, outputs, *(experts or [None])
            ))  # fmt: skip
    return found


def module_of(matrix: AdaptedMatrix, adapted: Sequence[str]) -> str:
    """Where PEFT keeps its A and B, when these names of ours are adapted.

    A module with two adapted parameters is wrapped twice, in their order: gate_up_proj inside.
    """
    if matrix.experts is None:
        return matrix.target
    inside = matrix.name == "w_gate_up" and "w_down" in adapted
    return matrix.target.rpartition(".")[0] + (".base_layer" if inside else "")


def tensor_of(matrix: AdaptedMatrix, letter: str, adapted: Sequence[str]) -> str:
    """The file's name of its A or B."""
    return f"base_model.model.{module_of(matrix, adapted)}.lora_{letter}.weight"


def to_peft(
    matrix: AdaptedMatrix, a: Float[np.ndarray, "*E R D"], b: Float[np.ndarray, "*E R F"]
) -> tuple[Float[np.ndarray, "ER D"], Float[np.ndarray, "F ER"]]:
    """A over the inputs, and B."""
    if matrix.experts is None:
        return a, b.T
    if matrix.name == "w_gate_up":
        half = b.shape[-1] // 2
        b = np.stack([b[..., :half], b[..., half:]], -1).reshape(b.shape)
    return _rows(a), _columns(b)


def from_peft(
    matrix: AdaptedMatrix, over: Over, a: Float[np.ndarray, "ER _"], b: Float[np.ndarray, "_ ER"]
) -> tuple[Float[np.ndarray, "*E R D"], Float[np.ndarray, "*E R F"]]:
    """The inverse of `to_peft`, for A over either axis."""
    if matrix.experts is None:
        return a, b.T
    n_experts = matrix.experts
    rows = a.reshape(n_experts, -1, a.shape[1])
    columns = b.reshape(b.shape[0], -1, n_experts).transpose(2, 1, 0)
    ours_a, ours_b = (rows, columns) if over == "in" else (columns, rows)
    if matrix.name == "w_gate_up":
        ours_b = np.concatenate([ours_b[..., 0::2], ours_b[..., 1::2]], -1)
    return ours_a, ours_b


def _rows(x: Float[np.ndarray, "E R D"]) -> Float[np.ndarray, "ER D"]:
    return x.reshape(-1, x.shape[-1])


def _columns(x: Float[np.ndarray, "E R D"]) -> Float[np.ndarray, "D ER"]:
    return x.transpose(2, 1, 0).reshape(x.shape[-1], -1)
