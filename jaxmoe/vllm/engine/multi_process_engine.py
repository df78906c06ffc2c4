# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine of several trainer processes: the first one talks to the servers for all.

Programs of the devices (gathering weights, the trainer's log-probs of a probe) are run by all
processes, in load(), in the same order. A server then needs only a file that it sees, and the
expected probe log-probs are known: the first process alone can sync a reconnected server at any
time. Next: jaxmoe/vllm/engine/vllm_engine.py, the first process's engine.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import EngineError, ModelConfig, VllmConfig
from jaxmoe.distributed.channel import Channel
from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.http_engine.packed_rollouts import deserialize_rollouts, serialize_rollouts
from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.http_engine.probe import ProbeReference
from jaxmoe.model import Ops
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import TRAINING, count_shards, shard_batch
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.replies import TokenEnvironment
from jaxmoe.shapes import Params
from jaxmoe.vllm.engine.expert_format import pack_for_sync
from jaxmoe.vllm.engine.vllm_engine import VllmEngine
from jaxmoe.vllm.plugin.manifest import UpdateRejected
from jaxmoe.vllm.plugin.received_bytes import ReceivedBytes
from jaxmoe.weight_sync.sent_shards import SentShards
from jaxmoe.weight_sync.sent_tensors import Experts
from jaxmoe.weight_sync.sharded_files import check_shared_directory, write_sharded_files
from jaxmoe.weight_sync.update import create_run_id


class MultiProcessVllmEngine:
    """An Engine whose methods are called by all processes, in the same order."""

    def __init__(
        self,
        cfg: ModelConfig,
        ops: Ops,
        vllm: VllmConfig,
        mesh: Mesh | None,
        *,
        across: str = "ring",
        channel: Channel | None = None,
        **sizes: Any,
    ) -> None:
        self._cfg, self._vllm, self._mesh = cfg, vllm, mesh
        self._ops = sharded_ops(ops, mesh, cfg, method=across)
        self._channel = channel or Channel("vllm")
        self.incidents: list[str] = []
        self.sent_frac: float | None = None
        self._sent: SentShards | None = None
        self._engine: VllmEngine | None = None  # in the first process only
        self._n_shared_incidents = 0  # incidents already sent to all processes

        def begin() -> bytes:
            run = create_run_id()
            self._engine = VllmEngine(cfg, ops, vllm, run=run, **sizes)
            begun = {
                "run": run,
                "probe": self._engine.probe.scored_tokens,
                "experts": self._engine.experts,
            }
            return json.dumps(begun).encode()

        try:
            begun = json.loads(self._channel.broadcast_from_first(begin))
            self._run, self._probe = begun["run"], begun["probe"]
            self._experts: Experts = begun["experts"]
            # A folder that is not shared would otherwise show at the first weight sync only.
            check_shared_directory(vllm.weights_dir, f"jaxmoe-{self._run}.lock", self._channel)
            if vllm.complete_sync_every > 1:
                self._sent = SentShards(
                    vllm.weights_dir,
                    self._run,
                    vllm.complete_sync_every,
                    self._channel,
                    read_folders,
                )
        except BaseException:
            self.close()
            raise

    @property
    def first_engine(self) -> VllmEngine | None:
        """The engine that samples for all processes; None in all but the first."""
        return self._engine

    def load(self, params: Params, version: int) -> None:
        """Sync the weights like `VllmEngine.load`; each process writes its part of the files."""
        if self._experts == "packed":
            params = pack_for_sync(params)
        dtype, sent, write_complete = self._vllm.dtype or self._cfg.dtype, self._sent, None
        named: dict[str, Any] = dict(dtype=dtype, version=version, experts=self._experts)
        if sent is not None:
            file = sent.write(params, self._cfg, **named)
            write_complete = partial(sent.write_complete, version)
        else:
            folder, named["run"] = self._vllm.weights_dir, self._run
            file = write_sharded_files(params, self._cfg, folder, channel=self._channel, **named)
        reference = ProbeReference(self._probe, self._probe_logps(params))
        is_refused = False

        def load_file(engine: VllmEngine) -> list[Rollout]:
            nonlocal is_refused
            try:
                engine.load_file(file, reference, write_complete)
            except EngineError:
                if not file.update_info.get("changes"):
                    raise
                is_refused = True
            return []

        self._run_on_first(load_file)
        if sent is None:
            return
        # All must agree: the files may be damaged for the first process too. A version that is
        # written once more is complete.
        if file.update_info["changes"] and any(self._channel.gather_values(is_refused)):
            file = sent.write(params, self._cfg, **named)
            self._run_on_first(load_file)
        self.sent_frac = file.sent_nbytes / sent.nbytes

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        samples: int = 1,
        environment: TokenEnvironment | None = None,
    ) -> list[Rollout]:
        """Engine.generate, with the same rollouts in every process.

        The first process samples the episodes and calls the environment: tools run once, there.
        """
        return self._run_on_first(
            lambda engine: engine.generate(
                prompts, sampling, seed=seed, samples=samples, environment=environment
            )
        )

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _run_on_first(self, call: Callable[[VllmEngine], list[Rollout]]) -> list[Rollout]:
        """Return in all processes the rollouts that the first one makes; adds its new incidents."""

        def run_and_pack() -> bytes:
            assert self._engine is not None, "the first process has the engine"
            rollouts = call(self._engine)
            new_incidents = self._engine.incidents[self._n_shared_incidents :]
            self._n_shared_incidents += len(new_incidents)
            return serialize_rollouts(rollouts, incidents=new_incidents)

        rollouts, fields = deserialize_rollouts(self._channel.broadcast_from_first(run_and_pack))
        self.incidents += fields["incidents"]
        return rollouts

    def _probe_logps(self, params: Params) -> np.ndarray:
        """Return the trainer's log-probs of the probe, which is repeated for every batch shard."""
        rows = count_shards(self._mesh, TRAINING.rows)
        time_shards = count_shards(self._mesh, TRAINING.time)
        parts = 2 * time_shards if time_shards > 1 else 1  # zigzag assigns two to each shard
        tokens_BT = np.zeros((rows, -(-len(self._probe) // parts) * parts), np.int32)
        tokens_BT[:, : len(self._probe)] = self._probe
        logps = partial(TRAINER_LOGPS, cfg=self._cfg, ops=self._ops)
        return gather_to_hosts(logps(params, shard_batch(tokens_BT, self._mesh)))[
            0, : len(self._probe)
        ]


def read_folders(folders: list[Path]) -> Mapping[str, np.ndarray] | None:
    """Return the bytes of the last folder's tensors; None if a folder is damaged."""
    try:
        return ReceivedBytes().read(folders)
    except UpdateRejected:
        return None


def open_vllm(
    cfg: ModelConfig,
    ops: Ops,
    vllm: VllmConfig,
    *,
    mesh: Mesh | None,
    across: str,
    work: Path,
    **sizes: Any,
) -> VllmEngine | MultiProcessVllmEngine:
    """Return the engine of this process, or of all processes together."""
    if jax.process_count() == 1:
        return VllmEngine(cfg, ops, vllm, work=work, **sizes)
    return MultiProcessVllmEngine(cfg, ops, vllm, mesh, across=across, work=work, **sizes)
