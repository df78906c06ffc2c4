# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine of several processes: the first one speaks to the servers, all have the answers.

What is a program of the devices (gathering weights, the trainer's log-probs of a probe) is run by
all, in load(), in one order. What a server needs is then a file that it sees, and what it must
answer is known: a server that comes back is synced by the first process alone, at any time.
Next: jaxmoe/vllm/engine.py, which the first process has.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import ModelConfig, VllmConfig
from jaxmoe.model import Ops
from jaxmoe.parallel.channel import Channel
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.processes import on_hosts
from jaxmoe.parallel.sharding import TRAINING, place, shards_of
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.packed_rollouts import deserialize_rollouts, serialize_rollouts
from jaxmoe.shapes import Params
from jaxmoe.vllm.engine import LOGPS, VllmEngine
from jaxmoe.vllm.sync import ProbeReference
from jaxmoe.weight_sync.shares import require_shared, write_shares
from jaxmoe.weight_sync.update import new_run


class SharedVllmEngine:
    """An Engine whose every method is called by all processes, in the same order."""

    def __init__(
        self, cfg: ModelConfig, ops: Ops, vllm: VllmConfig, mesh: Mesh | None, *,
        across: str = "ring", channel: Channel | None = None, **sizes: Any,
    ) -> None:  # fmt: skip
        self._cfg, self._vllm, self._mesh = cfg, vllm, mesh
        self._ops = sharded_ops(ops, mesh, cfg, across=across)
        self._channel = channel or Channel("vllm")
        self.incidents: list[str] = []
        self._own: VllmEngine | None = None  # the first process has one
        self._told = 0  # incidents of it that all know

        def begin() -> bytes:
            run = new_run()
            self._own = VllmEngine(cfg, ops, vllm, run=run, **sizes)
            return json.dumps({"run": run, "probe": self._own.probe.given}).encode()

        try:
            begun = json.loads(self._channel.from_first(begin))
            self._run, self._probe = begun["run"], begun["probe"]
            require_shared(vllm.weights_dir, f"jaxmoe-{self._run}.lock", self._channel)
        except BaseException:
            self.close()
            raise

    def load(self, params: Params, version: int) -> None:
        """`VllmEngine.load`; each process writes its share of the file."""
        file = write_shares(
            params, self._cfg, self._vllm.weights_dir, dtype=self._vllm.dtype or self._cfg.dtype,
            run=self._run, version=version, channel=self._channel,
        )  # fmt: skip
        reference = ProbeReference(self._probe, self._logps(params))

        def hold(own: VllmEngine) -> list[Rollout]:
            own.hold(file, reference)
            return []

        self._by_first(hold)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """Engine.generate, the same rollouts in every process."""
        return self._by_first(
            lambda own: own.generate(prompts, sampling, seed=seed, samples=samples)
        )

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _by_first(self, make: Callable[[VllmEngine], list[Rollout]]) -> list[Rollout]:
        """What the first process makes, in all of them; with what went wrong meanwhile."""

        def packed() -> bytes:
            assert self._own is not None, "the first process has the engine"
            made = make(self._own)
            news = self._own.incidents[self._told :]
            self._told += len(news)
            return serialize_rollouts(made, incidents=news)

        rollouts, told = deserialize_rollouts(self._channel.from_first(packed))
        self.incidents += told["incidents"]
        return rollouts

    def _logps(self, params: Params) -> np.ndarray:
        """The trainer's log-probs of the probe: a row for each part of a batch, all alike."""
        rows = shards_of(self._mesh, TRAINING.rows)
        cut = shards_of(self._mesh, TRAINING.time)
        parts = 2 * cut if cut > 1 else 1  # zigzag gives each two
        tokens_BT = np.zeros((rows, -(-len(self._probe) // parts) * parts), np.int32)
        tokens_BT[:, : len(self._probe)] = self._probe
        logps = partial(LOGPS, cfg=self._cfg, ops=self._ops)
        return on_hosts(logps(params, place(tokens_BT, self._mesh)))[0, : len(self._probe)]


def open_vllm(
    cfg: ModelConfig, ops: Ops, vllm: VllmConfig, *, mesh: Mesh | None, across: str, work: Path,
    **sizes: Any,
) -> VllmEngine | SharedVllmEngine:  # fmt: skip
    """The engine of this process, or of all together."""
    if jax.process_count() == 1:
        return VllmEngine(cfg, ops, vllm, work=work, **sizes)
    return SharedVllmEngine(cfg, ops, vllm, mesh, across=across, work=work, **sizes)
