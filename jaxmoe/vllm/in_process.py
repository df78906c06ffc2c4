# SPDX-License-Identifier: Apache-2.0
"""vLLM in the trainer's own process: rollout.vllm.launch=0 and no url.

One thread owns vLLM and steps it; whatever else is asked of it is done between two steps, so that
requests come from any thread and a weight sync treats those in flight as a server would.
Next: jaxmoe/vllm/replica.py.
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
from jaxmoe.observe.progress import phase
from jaxmoe.vllm.adapter import ServedAdapter
from jaxmoe.vllm.backend import RequestFailed
from jaxmoe.vllm.server import default_environment, flags, inspect_python, options, write_config
from jaxmoe.vllm_plugin.names import ADAPTER, NUMBER

T = TypeVar("T")


@dataclass
class PendingRequest:
    """A request in flight: as many of vLLM's own as it asks for samples."""

    future: Future[dict[str, Any]]
    count: int
    outputs: dict[int, Any]  # sample -> vLLM's output, when it is done


class InProcessBackend:
    """Backend over an LLM of this process."""

    def __init__(
        self, cfg: ModelConfig, vllm: VllmConfig, *, work: Path, context: int, rows: int,
        adapter: ServedAdapter | None = None,
    ) -> None:  # fmt: skip
        self.name = "vLLM in this process"
        self._timeout_s = vllm.request_timeout_s
        cpu = inspect_python(sys.executable)["cpu"]
        dtype = vllm.dtype or cfg.dtype
        chosen = options(replace(vllm, transport="files"), cfg, context=context, rows=rows, cpu=cpu)
        if adapter is None:
            folder = write_config(cfg, dtype, work / "model")
        else:
            chosen |= adapter.options(cpu)
            folder = adapter.folder(cfg, dtype, work, cpu)
        for name, value in default_environment(cpu).items():
            os.environ.setdefault(name, value)
        # one process: tensors are handed over, and vLLM starts in seconds
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with phase("starting vLLM in this process"):
            self._llm = _llm(["--model", str(folder), *flags(chosen), *shlex.split(vllm.args)])
        # it is in vLLM before anybody asks for it, or lost: at its path there is nothing
        lost = str(work / "the adapter that was synced")
        self._lora = None if adapter is None else _lora_request(lost)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in_flight: dict[
            str, tuple[PendingRequest, int, str]
        ] = {}  # ours -> .., sample, vLLM's
        self._deferred: list[Callable[[], None]] = []  # requests that came while it was paused
        self._paused = ""
        self._number = 0
        self._dead = ""
        self._drained: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="jaxmoe-vllm", daemon=True)
        self._thread.start()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()

        def begin() -> None:
            if self._paused:
                self._deferred.append(begin)
            elif not future.cancelled():
                self._begin(body, future)

        self._calls.put(begin)
        try:
            return self._await(future)
        except RequestFailed:  # nobody waits for it any more
            self._calls.put(lambda: self._forget(future))
            raise

    def context(self) -> int:
        return int(self._llm.model_config.max_model_len)

    def health(self) -> None:
        self._do(lambda: None)

    def loaded_state(self) -> list[dict[str, Any]]:
        return self._do(lambda: self._llm.collective_rpc("jaxmoe_loaded_state"))

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        self._do(lambda: self._llm.init_weight_transfer_engine({"init_info": init_info}))

    def pause(self, mode: str) -> None:
        drained: Future[None] = Future()

        def stop() -> None:
            self._paused = mode
            if mode == "abort":
                self._abort()
            if mode == "wait" and self._in_flight:
                self._drained.append(drained)
            else:
                drained.set_result(None)

        self._do(stop)
        self._await(drained)

    def resume(self) -> None:
        def go_on() -> None:
            self._paused = ""
            deferred, self._deferred = self._deferred, []
            for begin in deferred:
                begin()

        self._do(go_on)

    def start_update(self) -> None:
        self._do(self._llm.start_weight_update)

    def update(self, update_info: dict[str, Any]) -> None:
        self._do(lambda: self._llm.update_weights({"update_info": update_info}))

    def finish_update(self, label: str) -> None:
        self._do(lambda: self._llm.finish_weight_update(label))

    def load_adapter(self, folder: str) -> None:
        self._do(lambda: self._llm.collective_rpc("jaxmoe_load_adapter", args=(folder,)))

    def recorded(self, fn: Callable[[], T]) -> tuple[T, list[dict[str, Any]]]:
        """What fn gives, and of each worker what its modules gave for the one forward in it."""
        self._do(lambda: self._llm.collective_rpc("jaxmoe_record"))
        try:
            found = fn()
        finally:
            told = self._do(lambda: self._llm.collective_rpc("jaxmoe_recorded"))
        return found, told

    def reset_prefix_cache(self) -> bool:
        return self._do(lambda: bool(self._llm.reset_prefix_cache(reset_running_requests=True)))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(self._timeout_s)

    def _do(self, fn: Callable[[], Any]) -> Any:
        """Run on the thread that owns vLLM, between two steps."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(fn())
            except Exception as error:
                future.set_exception(RequestFailed(f"{self.name}: {type(error).__name__}: {error}"))

        self._calls.put(call)
        return self._await(future)

    def _await(self, future: Future[Any]) -> Any:
        waited = 0.0
        while True:
            if self._dead:
                raise RequestFailed(f"{self.name}: {self._dead}")
            try:
                return future.result(timeout=0.5)
            except TimeoutError as error:
                if future.done():  # it came in this moment
                    continue
                waited += 0.5
                if waited >= self._timeout_s:
                    raise RequestFailed(
                        f"{self.name} did not answer within {self._timeout_s:g} s"
                    ) from error

    def _run(self) -> None:
        try:
            while True:
                busy = bool(self._in_flight) and self._paused != "keep"
                try:
                    call = self._calls.get(block=not busy)
                except queue.Empty:
                    self._step()
                    continue
                if call is None:
                    self._dead = "it was closed"
                    return
                call()
        except BaseException as error:  # told to every thread that waits
            self._dead = f"{type(error).__name__}: {error}"
        finally:
            self._llm.llm_engine.engine_core.shutdown()

    def _begin(self, body: dict[str, Any], future: Future[dict[str, Any]]) -> None:
        try:
            params = dict(body["sampling_params"])
            count, seed = params.pop("n", 1), params.pop("seed", 0)
            pending = PendingRequest(future, count, {})
            for sample in range(count):
                self._number += 1
                name = str(self._number)
                theirs = self._llm.llm_engine.add_request(
                    name, {"prompt_token_ids": list(body["token_ids"])},
                    _sampling(params | {"seed": seed + sample}), lora_request=self._lora,
                )  # fmt: skip
                self._in_flight[name] = (pending, sample, theirs)
        except Exception as error:
            future.set_exception(RequestFailed(f"{self.name}: {type(error).__name__}: {error}"))

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            if output.finished:
                self._finish(output)
        self._tell_drained()

    def _tell_drained(self) -> None:
        if not self._in_flight:
            drained, self._drained = self._drained, []
            for future in drained:
                future.set_result(None)

    def _forget(self, future: Future[dict[str, Any]]) -> None:
        future.cancel()  # where it did not begin yet
        names = [n for n, (pending, _, _) in self._in_flight.items() if pending.future is future]
        self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._in_flight[name]
        self._tell_drained()

    def _finish(self, output: Any) -> None:
        found = self._in_flight.pop(output.request_id, None)
        if found is None:
            return
        pending, sample, _ = found
        pending.outputs[sample] = output
        if len(pending.outputs) == pending.count and not pending.future.done():
            pending.future.set_result(_response([pending.outputs[i] for i in range(pending.count)]))

    def _abort(self) -> None:
        """End the requests in flight; the tokens so far are the response, as from a server."""
        abort = import_module("vllm.v1.engine").FinishReason.ABORT
        engine = self._llm.llm_engine
        for name, (_, _, theirs) in list(self._in_flight.items()):
            state = engine.output_processor.request_states.get(theirs)
            output = state and state.make_request_output([], None, abort, None)
            engine.abort_request([name])
            if output is not None:
                self._finish(output)


def _llm(command_line: list[str]) -> Any:
    """An LLM with these options of vLLM's command line."""
    chosen = import_module("vllm.engine.arg_utils").EngineArgs
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    parsed = chosen.add_cli_args(parser).parse_args(command_line)
    return import_module("vllm").LLM.from_engine_args(chosen.from_cli_args(parsed))


def _lora_request(path: str) -> Any:
    return import_module("vllm.lora.request").LoRARequest(ADAPTER, NUMBER, path)


def _sampling(params: dict[str, Any]) -> Any:
    theirs = import_module("vllm.sampling_params")
    return theirs.SamplingParams(**params, output_kind=theirs.RequestOutputKind.FINAL_ONLY)


def _response(outputs: list[Any]) -> dict[str, Any]:
    """vLLM's outputs as its server would write them."""
    first = outputs[0].prompt_logprobs
    prompt = first and [
        row and {t: {"logprob": e.logprob} for t, e in row.items()} for row in first
    ]
    choices = [_choice(i, output.outputs[0]) for i, output in enumerate(outputs)]
    return {"choices": choices, "prompt_logprobs": prompt}


def _choice(index: int, output: Any) -> dict[str, Any]:
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
        "index": index, "token_ids": tokens, "finish_reason": str(output.finish_reason),
        "logprobs": {"content": content}, "routed_experts": experts, "weight_versions": spans,
    }  # fmt: skip
