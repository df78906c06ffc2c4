# SPDX-License-Identifier: Apache-2.0
"""Open the engine of a config; the only module that chooses one. Next: jaxmoe/rollout/engine.py."""

from pathlib import Path

from jax.sharding import Mesh

from jaxmoe.checkpoint.base import base_folder
from jaxmoe.config import Config
from jaxmoe.model import Ops
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.native import NativeEngine


def open_engine(cfg: Config, ops: Ops, work: Path, mesh: Mesh | None = None) -> Engine:
    """Open the engine of a run, which the caller closes; servers write logs to `work`/engine.

    `ops` are those of one device; the native engine shards them over the run's mesh.
    """
    r = cfg.rollout
    sizes = dict(
        max_prompt_tokens=cfg.data.max_prompt_tokens, max_new_tokens=r.max_new_tokens,
        max_rows=r.max_parallel_sequences,
    )  # fmt: skip
    if r.engine == "native":
        return NativeEngine(cfg.model, ops, keep_experts=cfg.records_experts, mesh=mesh, **sizes)
    # Imported here, since vLLM's packages are optional.
    from jaxmoe.vllm.multi_process_engine import open_vllm
    from jaxmoe.vllm.served_adapter import ServedAdapter

    serves = cfg.lora.ranks and r.vllm.lora == "adapter"
    adapter = ServedAdapter(cfg.lora, base_folder(cfg)) if serves else None
    return open_vllm(
        cfg.model, ops, r.vllm, mesh=mesh, across=cfg.mesh.attention, work=work / "engine",
        adapter=adapter, **sizes,
    )  # fmt: skip
