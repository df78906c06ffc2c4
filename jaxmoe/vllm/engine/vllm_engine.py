# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine: the pool of servers over vLLMs, with their transports of weights.

Next: jaxmoe/http_engine/pooled_engine.py samples; multi_process_engine.py is the engine of several
processes.
"""

from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from jaxmoe.config import EngineError, ModelConfig, VllmConfig
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.check_request import RequestLimits
from jaxmoe.http_engine.pooled_engine import PooledEngine
from jaxmoe.http_engine.probe import Probe
from jaxmoe.http_engine.replica import Replica
from jaxmoe.model import Ops
from jaxmoe.shapes import Params
from jaxmoe.vllm.client.backend import VllmBackend
from jaxmoe.vllm.engine.expert_format import FullWeights, choose_sent_experts, pack_for_sync
from jaxmoe.vllm.engine.in_process_backend import InProcessBackend
from jaxmoe.vllm.engine.open_backends import check_available, check_context, open_backends
from jaxmoe.vllm.engine.served_adapter import ServedAdapter
from jaxmoe.vllm.engine.transport import Transport
from jaxmoe.weight_sync.files import write_files
from jaxmoe.weight_sync.sent_tensors import Experts
from jaxmoe.weight_sync.sent_weights import SentWeights
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate, compute_manifest

MAX_PROBE_ABS_DIFF = {"float32": 1e-4, "bfloat16": 0.1}  # mean |Δlogp| of a probe, nats
DENSE = FullWeights()


class VllmEngine(PooledEngine):
    """An Engine over one or several vLLMs, its `backends`."""

    def __init__(
        self,
        cfg: ModelConfig,
        ops: Ops,
        vllm: VllmConfig,
        *,
        work: Path,
        max_prompt_tokens: int,
        max_new_tokens: int,
        max_rows: int,
        max_context: int = 0,
        run: str = "",
        sent: FullWeights | ServedAdapter = DENSE,
    ) -> None:
        """`max_context`: tokens of an episode; 0: max_prompt_tokens + max_new_tokens."""
        self._sent, self._vllm = sent, vllm
        context = max_context or max_prompt_tokens + max_new_tokens
        super().__init__(
            cfg,
            ops,
            limits=RequestLimits(max_prompt_tokens, max_new_tokens, context),
            max_rows=max_rows,
            retries=vllm.retries,
            on_weight_sync=vllm.on_weight_sync,
            weights_dir=vllm.weights_dir,
            dtype=vllm.dtype,
            run=run,
        )
        in_process = not vllm.url and vllm.launch == 0
        self._transport = "in_process" if in_process else vllm.transport
        # Fails on an unusable folder before servers start, which takes minutes.
        if self._transport == "files" or sent.are_adapters:
            self.open_weights_directory()
        self._sent_weights = (
            SentWeights(vllm.weights_dir, self._run, vllm.complete_sync_every)
            if vllm.complete_sync_every > 1
            else None
        )
        try:
            opened = open_backends(cfg, vllm, work, context, max_rows, sent)
        except BaseException:
            self.close()
            raise
        try:
            needed = context + 1
            context, unavailable = check_available(opened, needed)
            for backend in [backend for backend, _ in opened if backend not in unavailable]:
                with suppress(RequestFailed):  # checked again with the first weights
                    backend.read_workers()
            self.experts: Experts = choose_sent_experts(
                [backend for backend, _ in opened if backend not in unavailable], sent.four_bits
            )
            loosest = "bfloat16" if "bfloat16" in (self._dtype, cfg.dtype) else "float32"
            self.probe = Probe(
                cfg,
                bound=vllm.probe_abs_diff or MAX_PROBE_ABS_DIFF[loosest],
                context=context,
                name_setting=name_setting,
            )
        except BaseException:
            for backend, server in opened:
                backend.close()
                if server is not None:
                    server.stop()
            self.close()
            raise
        replicas = [
            Replica(
                backend,
                server,
                sender=Transport(self._transport),
                cfg=cfg,
                probe=self.probe,
                retries=vllm.retries,
                report=self.incidents.append,
                check=partial(check_context, needed_tokens=needed),
                try_out=self._try_out,
                name_setting=name_setting,
            )
            for backend, server in opened
        ]
        self.serve(replicas, unavailable)

    def load(self, params: Params, version: int) -> None:
        """Sync the weights to every replica and verify them; see Engine.load.

        Unavailable replicas get them when they reconnect. Raises EngineError if a replica holds
        other weights, or if none is left.
        """
        named: dict[str, Any] = dict(dtype=self._dtype, run=self._run, version=version)
        if self.experts == "packed":
            params = pack_for_sync(params)
        named["experts"] = self.experts
        folder, manifest_lock = self._vllm.weights_dir, Lock()
        file = self._sent.write_file(params, self._cfg, folder, run=self._run, version=version)
        sent, write_complete = self._sent_weights, None
        if sent is not None:
            file = sent.write(
                params, self._cfg, dtype=self._dtype, version=version, experts=self.experts
            )
            write_complete = partial(sent.write_complete, version)
            self.sent_frac = file.sent_nbytes / sent.nbytes
        elif file is None and self._transport == "files":
            reuse, self._reusable_file = self._reusable_file, None
            file = write_files(params, self._cfg, folder, **named, reuse=reuse)

        @cache
        def manifest() -> ManifestDict:
            return compute_manifest(params, self._cfg, **named)

        def build_update(transport: Transport) -> WeightUpdate:
            with manifest_lock:  # only the first replica computes it
                manifest_dict = manifest()
            return transport.build_update(params, self._cfg, manifest_dict, **named)

        previous_file = self.sync_weights(params, version, file, build_update, write_complete)
        if sent is None:
            self._reusable_file = self._sent.keep_file(previous_file)
        elif previous_file is not None:
            previous_file.close()

    def _try_out(self, backend: VllmBackend) -> None:
        """Check that the backend applies what this run sends."""
        folder = self._vllm.weights_dir
        self._sent.check_applied(backend, self._cfg, self.probe.scored_tokens, folder, self._run)

    def loaded_states(self) -> list[dict[str, Any]]:
        """Return the state that each worker of each vLLM reports of its loaded weights."""
        routes = [backend for backend in self.backends if isinstance(backend, VllmBackend)]
        return [worker for backend in routes for worker in backend.loaded_state()]

    def record_forward(self, tokens: list[int]) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Return the log-probs of a sequence, and the outputs of vLLM's modules by worker.

        Raises EngineError unless vLLM is in this process and its modules have the known names.
        """
        backend = self.backends[0]
        if not isinstance(backend, InProcessBackend):
            raise EngineError("it needs vLLM in this process, --set rollout.vllm.launch=0")
        try:
            (logp, _), workers = backend.record_forward(
                partial(backend.score_tokens, tokens, self._cfg)
            )
        except RequestFailed as error:
            raise EngineError(str(error)) from error
        return logp, workers


def name_setting(name: str, value: Any) -> str:
    """Text that sets an option of this engine on the command line."""
    return f"--set rollout.vllm.{name}={value}"
