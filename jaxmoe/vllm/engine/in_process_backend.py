# SPDX-License-Identifier: Apache-2.0
"""vLLM in the trainer's own process: rollout.vllm.launch=0 and no url.

One thread owns vLLM and steps it; all other calls run on it between two steps. So requests may come
from any thread, and a weight sync treats those in flight as a server would. Next:
jaxmoe/http_engine/replica.py.
"""

import base64
import io
import os
import queue
import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxmoe.config import ModelConfig, VllmConfig
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.observe.progress import report_phase
from jaxmoe.vllm.client.backend import VllmBackend
from jaxmoe.vllm.engine.expert_format import FullWeights
from jaxmoe.vllm.engine.served_adapter import ServedAdapter
from jaxmoe.vllm.engine.server import (
    build_engine_options,
    default_environment,
    format_flags,
    inspect_python,
)
from jaxmoe.vllm.plugin.names import ADAPTER_ID, ADAPTER_NAME

T = TypeVar("T")


@dataclass
class PendingRequest:
    """A request in flight: one request of vLLM's for each sample."""

    future: Future[dict[str, Any]]
    count: int
    outputs: dict[int, Any]  # sample -> vLLM's output, when it is done


class InProcessBackend(VllmBackend):
    """Backend over an LLM in this process."""

    def __init__(
        self,
        cfg: ModelConfig,
        vllm: VllmConfig,
        *,
        work: Path,
        context: int,
        rows: int,
        sent: FullWeights | ServedAdapter,
    ) -> None:
        self.name = "vLLM in this process"
        self._timeout_s = vllm.request_timeout_s
        cpu = inspect_python(sys.executable)["cpu"]
        dtype = vllm.dtype or cfg.dtype
        # The backend for files also takes tensors that are handed over within the process.
        chosen = build_engine_options(
            replace(vllm, transport="files"), cfg, context=context, rows=rows, cpu=cpu
        )
        chosen |= sent.vllm_options(cpu)
        folder = sent.prepare_model(cfg, dtype, work, cpu)
        for name, value in default_environment(cpu).items():
            os.environ.setdefault(name, value)
        # In one process tensors need no copy, and vLLM starts in seconds.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with report_phase("starting vLLM in this process"):
            self._llm = _start_llm(
                ["--model", str(folder), *format_flags(chosen), *shlex.split(vllm.args)]
            )
        # The adapter is loaded before the first request. If vLLM lost it, loading it again from
        # this path, which does not exist, fails instead of serving the base.
        lost = str(work / "the adapter that was synced")
        self._lora = _lora_request(lost) if sent.are_adapters else None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # By our request id: the request, the sample's number, vLLM's request id.
        self._in_flight: dict[str, tuple[PendingRequest, int, str]] = {}
        self._deferred: list[Callable[[], None]] = []  # requests made while it was paused
        self._paused = ""
        self._number = 0
        self._dead = ""
        self._drained: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run_loop, name="jaxmoe-vllm", daemon=True)
        self._thread.start()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()

        def begin() -> None:
            if self._paused:
                self._deferred.append(begin)
            elif not future.cancelled():
                self._add_request(body, future)

        self._calls.put(begin)
        try:
            return self._wait_for_result(future)
        except RequestFailed:  # the caller no longer waits
            self._calls.put(lambda: self._cancel_request(future))
            raise

    def max_context(self) -> int:
        return int(self._llm.model_config.max_model_len)

    def check_health(self) -> None:
        self._call_llm(lambda: None)

    def loaded_state(self) -> list[dict[str, Any]]:
        return self._call_llm(lambda: self._llm.collective_rpc("jaxmoe_loaded_state"))

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        self._call_llm(lambda: self._llm.init_weight_transfer_engine({"init_info": init_info}))

    def pause(self, mode: str) -> None:
        drained: Future[None] = Future()

        def stop() -> None:
            self._paused = mode
            if mode == "abort":
                self._abort_requests()
            if mode == "wait" and self._in_flight:
                self._drained.append(drained)
            else:
                drained.set_result(None)

        self._call_llm(stop)
        self._wait_for_result(drained)

    def resume(self) -> None:
        def restart_deferred() -> None:
            self._paused = ""
            deferred, self._deferred = self._deferred, []
            for begin in deferred:
                begin()

        self._call_llm(restart_deferred)

    def start_update(self) -> None:
        self._call_llm(self._llm.start_weight_update)

    def send_update(self, update_info: dict[str, Any]) -> None:
        self._call_llm(lambda: self._llm.update_weights({"update_info": update_info}))

    def finish_update(self, label: str) -> None:
        self._call_llm(lambda: self._llm.finish_weight_update(label))

    def load_adapter(self, folder: str) -> None:
        self._call_llm(lambda: self._llm.collective_rpc("jaxmoe_load_adapter", args=(folder,)))

    def record_forward(self, fn: Callable[[], T]) -> tuple[T, list[dict[str, Any]]]:
        """Return fn's result, and each worker's recorded module outputs of its one forward."""
        self._call_llm(lambda: self._llm.collective_rpc("jaxmoe_record"))
        try:
            result = fn()
        finally:
            recordings = self._call_llm(lambda: self._llm.collective_rpc("jaxmoe_recorded"))
        return result, recordings

    def reset_prefix_cache(self) -> bool:
        return self._call_llm(
            lambda: bool(self._llm.reset_prefix_cache(reset_running_requests=True))
        )

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(self._timeout_s)

    def _call_llm(self, fn: Callable[[], Any]) -> Any:
        """Run fn on the thread that owns vLLM, between two steps."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(fn())
            except Exception as error:
                future.set_exception(RequestFailed(f"{self.name}: {type(error).__name__}: {error}"))

        self._calls.put(call)
        return self._wait_for_result(future)

    def _wait_for_result(self, future: Future[Any]) -> Any:
        waited = 0.0
        while True:
            if self._dead:
                raise RequestFailed(f"{self.name}: {self._dead}")
            try:
                # Short waits, so that the end of vLLM's thread is noticed.
                return future.result(timeout=0.5)
            except TimeoutError as error:
                if future.done():  # it finished just now
                    continue
                waited += 0.5
                if waited >= self._timeout_s:
                    raise RequestFailed(
                        f"{self.name} did not answer within {self._timeout_s:g} s"
                    ) from error

    def _run_loop(self) -> None:
        try:
            while True:
                # With "keep", requests stay in flight and must not advance while weights change.
                busy = bool(self._in_flight) and self._paused != "keep"
                try:
                    call = self._calls.get(block=not busy)
                except queue.Empty:
                    self._step_engine()
                    continue
                if call is None:
                    self._dead = "it was closed"
                    return
                call()
        except BaseException as error:  # reported to every waiting thread
            self._dead = f"{type(error).__name__}: {error}"
        finally:
            self._llm.llm_engine.engine_core.shutdown()

    def _add_request(self, body: dict[str, Any], future: Future[dict[str, Any]]) -> None:
        try:
            params = dict(body["sampling_params"])
            count, seed = params.pop("n", 1), params.pop("seed", 0)
            pending = PendingRequest(future, count, {})
            for sample in range(count):
                self._number += 1
                name = str(self._number)
                vllm_request_id = self._llm.llm_engine.add_request(
                    name,
                    {"prompt_token_ids": list(body["token_ids"])},
                    _build_sampling_params(params | {"seed": seed + sample}),
                    lora_request=self._lora,
                )
                self._in_flight[name] = (pending, sample, vllm_request_id)
        except Exception as error:
            future.set_exception(RequestFailed(f"{self.name}: {type(error).__name__}: {error}"))

    def _step_engine(self) -> None:
        for output in self._llm.llm_engine.step():
            if output.finished:
                self._finish_sample(output)
        self._resolve_drained()

    def _resolve_drained(self) -> None:
        if not self._in_flight:
            drained, self._drained = self._drained, []
            for future in drained:
                future.set_result(None)

    def _cancel_request(self, future: Future[dict[str, Any]]) -> None:
        future.cancel()  # in case it was not added yet
        names = [n for n, (pending, _, _) in self._in_flight.items() if pending.future is future]
        self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._in_flight[name]
        self._resolve_drained()

    def _finish_sample(self, output: Any) -> None:
        entry = self._in_flight.pop(output.request_id, None)
        if entry is None:
            return
        pending, sample, _ = entry
        pending.outputs[sample] = output
        if len(pending.outputs) == pending.count and not pending.future.done():
            pending.future.set_result(
                _format_response([pending.outputs[i] for i in range(pending.count)])
            )

    def _abort_requests(self) -> None:
        """End the requests in flight; their tokens so far are the response, as from a server."""
        abort = import_module("vllm.v1.engine").FinishReason.ABORT
        engine = self._llm.llm_engine
        for name, (_, _, vllm_request_id) in list(self._in_flight.items()):
            # Aborting discards the tokens so far, so they are read first.
            state = engine.output_processor.request_states.get(vllm_request_id)
            output = state and state.make_request_output([], None, abort, None)
            engine.abort_request([name])
            if output is not None:
                self._finish_sample(output)


def _start_llm(command_line: list[str]) -> Any:
    """Start an LLM with these options of vLLM's command line."""
    chosen = import_module("vllm.engine.arg_utils").EngineArgs
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    parsed = chosen.add_cli_args(parser).parse_args(command_line)
    return import_module("vllm").LLM.from_engine_args(chosen.from_cli_args(parsed))


def _lora_request(path: str) -> Any:
    return import_module("vllm.lora.request").LoRARequest(ADAPTER_NAME, ADAPTER_ID, path)


def _build_sampling_params(params: dict[str, Any]) -> Any:
    module = import_module("vllm.sampling_params")
    return module.SamplingParams(**params, output_kind=module.RequestOutputKind.FINAL_ONLY)


def _format_response(outputs: list[Any]) -> dict[str, Any]:
    """Return vLLM's outputs in the format of its server."""
    first = outputs[0].prompt_logprobs
    prompt = first and [
        row and {t: {"logprob": e.logprob} for t, e in row.items()} for row in first
    ]
    choices = [_format_choice(i, output.outputs[0]) for i, output in enumerate(outputs)]
    return {"choices": choices, "prompt_logprobs": prompt}


def _format_choice(index: int, output: Any) -> dict[str, Any]:
    tokens = list(output.token_ids)
    content = [
        {"token_id": token, "logprob": row[token].logprob}
        for token, row in zip(tokens, output.logprobs or [], strict=True)
    ]
    experts = None
    if output.routed_experts is not None:
        file = io.BytesIO()
        np.save(file, output.routed_experts)
        experts = base64.b64encode(file.getvalue()).decode()
    spans = [
        {"version": s.version, "start": s.start, "end": s.end} for s in output.weight_versions or []
    ]
    return {
        "index": index,
        "token_ids": tokens,
        "finish_reason": str(output.finish_reason),
        "logprobs": {"content": content},
        "routed_experts": experts,
        "weight_versions": spans,
    }
