# SPDX-License-Identifier: Apache-2.0
"""Which kernels the step has on a chip that is not here: its platform's own, where they take the
shapes. Whether they are right there, a run finds by trying. Next: jaxmoe/plan/compiled.py.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmoe.config import Config
from jaxmoe.kernels import Decision, decide
from jaxmoe.memory import microbatch_rows
from pallas_kernels.check.verdicts import KernelVerdict
from pallas_kernels.decode_attention import api as decoding
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import api as matmul
from pallas_kernels.sink_attention import api as attention
from pallas_kernels.token_logprobs import api as logprobs

IMPLS: dict[str, Mapping[str, Implementation[Any]]] = {
    "sink_attention": attention.IMPLS, "decode_attention": decoding.IMPLS,
    "grouped_swiglu": matmul.SWIGLU_IMPLS, "grouped_matmul": matmul.IMPLS,
    "token_logprobs": logprobs.IMPLS,
}  # fmt: skip


def kernels_on(cfg: Config, mesh: Mesh) -> Decision:
    """The choice of cfg.kernels on the mesh's devices, if every kernel that can run is right.

    Raises ConfigError as a run would.
    """
    device, arrays = mesh.devices.flat[0], shapes(cfg)

    def judge(operation: str, name: str) -> KernelVerdict:
        if not name.startswith("mosaic"):
            return KernelVerdict("refuses", "it is not compiled here")
        reasons: list[str | None] = []

        def ask(*given: jax.Array) -> None:
            reasons.append(IMPLS[operation][name].unsupported(*given))

        with jax.set_mesh(mesh):  # names the chip
            jax.eval_shape(ask, *arrays[operation])
        reason = reasons[0]
        return KernelVerdict("refuses", reason) if reason else KernelVerdict("right", "")

    chip = {"platform": device.platform, "kind": device.device_kind}
    return decide(cfg, lambda: chip, lambda _: judge)


def shapes(cfg: Config) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """By operation what one device gives a kernel: of a microbatch, and of a decode step."""
    m, mesh, r = cfg.model, cfg.mesh, cfg.rollout
    b, t = microbatch_rows(cfg), cfg.context // mesh.sequence
    n, k = m.n_q_heads // mesh.tensor, m.n_kv_heads // mesh.tensor
    rows = min(r.max_parallel_sequences, r.sequences_per_step)
    rows = -(-rows // (mesh.row_shards * mesh.sequence))
    experts = m.n_experts // (mesh.expert * mesh.tensor)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(m.dtype))

    sent = b * t * m.experts_per_token
    return {
        "sink_attention": (array(b, t, n, m.head_dim), array(b, t, k, m.head_dim)),
        "decode_attention": (
            array(rows, 1, n, m.head_dim), array(rows, cfg.context, k, m.head_dim),
        ),
        "grouped_swiglu": (array(sent, m.d_model), array(experts, m.d_model, 2 * m.d_expert)),
        "grouped_matmul": (array(sent, m.d_expert), array(experts, m.d_expert, m.d_model)),
        "token_logprobs": (array(b * (t - 1), m.d_model), array(m.d_model, m.padded_vocab)),
    }  # fmt: skip
