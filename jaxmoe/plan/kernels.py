# SPDX-License-Identifier: Apache-2.0
"""Choose the step's kernels on another machine: those of its platform that support the shapes.

Only a run on that machine can check that they are correct. Next: jaxmoe/plan/compiled.py.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmoe.config import Config
from jaxmoe.run.kernels import Decision, decide_kernels
from jaxmoe.run.memory import microbatch_rows
from pallas_kernels.check.verdicts import KernelVerdict
from pallas_kernels.decode_attention import api as decoding
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import api as matmul
from pallas_kernels.sink_attention import api as attention
from pallas_kernels.token_logprobs import api as logprobs

IMPLS: dict[str, Mapping[str, Implementation[Any]]] = {
    "sink_attention": attention.IMPLS,
    "decode_attention": decoding.IMPLS,
    "grouped_swiglu": matmul.SWIGLU_IMPLS,
    "grouped_matmul": matmul.IMPLS,
    "token_logprobs": logprobs.IMPLS,
}


def choose_mesh_kernels(cfg: Config, mesh: Mesh) -> Decision:
    """Choose the kernels on the mesh's devices, assuming that all supported kernels are correct.

    Raises: ConfigError, as a run does.
    """
    device, arrays = mesh.devices.flat[0], kernel_shapes(cfg)

    def judge(operation: str, name: str) -> KernelVerdict:
        if not name.startswith("mosaic"):
            return KernelVerdict("refuses", "jaxmoe.plan does not compile it")
        reasons: list[str | None] = []

        def ask_unsupported(*operands: jax.Array) -> None:
            reasons.append(IMPLS[operation][name].unsupported(*operands))

        with jax.set_mesh(mesh):  # names the chip
            # Only shapes and dtypes are read, so no array and no device is needed.
            jax.eval_shape(ask_unsupported, *arrays[operation])
        reason = reasons[0]
        return KernelVerdict("refuses", reason) if reason else KernelVerdict("right", "")

    chip = {"platform": device.platform, "kind": device.device_kind}
    return decide_kernels(cfg, lambda: chip, lambda _: judge)


def kernel_shapes(cfg: Config) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """Shapes of a kernel's arrays on one device: of a microbatch, and of a decode step."""
    m, mesh, r = cfg.model, cfg.mesh, cfg.rollout
    b, t = microbatch_rows(cfg), cfg.context // mesh.sequence
    n, k = m.n_q_heads // mesh.tensor, m.n_kv_heads // mesh.tensor
    rows = min(r.max_parallel_sequences, r.sequences_per_step)
    rows = -(-rows // (mesh.row_shards * mesh.sequence))
    experts = m.n_experts // (mesh.expert * mesh.tensor)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(m.dtype))

    routed_rows = b * t * m.experts_per_token
    return {
        "sink_attention": (array(b, t, n, m.head_dim), array(b, t, k, m.head_dim)),
        "decode_attention": (
            array(rows, 1, n, m.head_dim),
            array(rows, cfg.context, k, m.head_dim),
        ),
        "grouped_swiglu": (
            array(routed_rows, m.d_model),
            array(experts, m.d_model, 2 * m.d_expert),
        ),
        "grouped_matmul": (array(routed_rows, m.d_expert), array(experts, m.d_expert, m.d_model)),
        # A row's last token has no target.
        "token_logprobs": (array(b * (t - 1), m.d_model), array(m.d_model, m.padded_vocab)),
    }
