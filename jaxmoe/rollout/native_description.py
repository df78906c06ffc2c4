# SPDX-License-Identifier: Apache-2.0
"""The native engine's description, without an import of jax. Next: jaxmoe/rollout/native.py."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxmoe.config import Config
from jaxmoe.config.engine import EngineDescription, EngineMemory, accept_config


def describe_native(cfg: Config) -> EngineDescription:
    return EngineDescription(
        open=open_native,
        summary="native engine",
        uses_trainer_forward=True,
        memory=native_memory,
        reports_kept_mass=True,
        reports_experts=True,
        runs_episodes=True,
        # The programs of several devices must not be started by several threads at once.
        runs_groups=cfg.mesh.devices == 1,
        reads_four_bits=True,
        check_processes=accept_config,
    )


def open_native(cfg: Config, ops: Any, _work: Path, mesh: Any) -> Any:
    """Open the native engine on the run's mesh; it shards the `ops` of one device."""
    from jaxmoe.rollout.native import NativeEngine
    from jaxmoe.rollout.native_flow import FlowEngine

    open_rows: Callable[..., Any] = NativeEngine
    if cfg.rollout.changes_in_flight:
        recompute = cfg.rollout.native.on_weight_sync == "recompute"
        open_rows = partial(FlowEngine, recompute=recompute)
    return open_rows(
        cfg.model,
        ops,
        keep_experts=cfg.records_experts,
        mesh=mesh,
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        max_new_tokens=cfg.rollout.max_new_tokens,
        max_rows=cfg.rollout.max_parallel_sequences,
        max_context=cfg.read_context if cfg.has_environment else 0,
        # A new context is longer than a message.
        max_reply_tokens=0 if cfg.rollout.max_episode_tokens else cfg.rollout.max_reply_tokens,
    )


def native_memory(cfg: Config) -> EngineMemory:
    from jaxmoe.rollout.native_memory import plan_native_memory

    return plan_native_memory(cfg)
