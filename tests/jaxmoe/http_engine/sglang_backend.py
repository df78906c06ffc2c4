# SPDX-License-Identifier: Apache-2.0
"""A second kind of server in one file: a backend of SGLang's HTTP routes, which has no plugin.

What it cannot prove by digests of tensors, the probe of log-probs proves.
"""

from typing import Any

import numpy as np

from jaxmoe.http_engine.backend import Completion, RequestFailed, SampleRequest, Workers
from jaxmoe.http_engine.completions import check_logp, check_sampled
from jaxmoe.http_engine.json_client import JsonClient
from jaxmoe.records import Sampling


class SglangBackend(JsonClient):
    """A server by its URL. Samples are one request, a list of prompts."""

    def sample(self, request: SampleRequest, cfg) -> list[Completion]:
        return [read_completion(x, request, cfg) for x in self._generate(request)]

    def score_tokens(self, tokens: list[int], cfg) -> tuple[np.ndarray, str]:
        request = SampleRequest(tokens, 1, 1, 0, Sampling(1, (), temperature=0.0))
        (result,) = self._generate(request, logprob_start_len=0)
        meta = result["meta_info"]
        logps = [check_logp(logp, "log-prob") for logp, *_ in meta["input_token_logprobs"][1:]]
        return np.asarray([0.0, *logps], np.float32), meta["weight_version"]

    def _generate(self, request: SampleRequest, **options: Any) -> list[dict[str, Any]]:
        sampling = request.sampling
        params = [
            {
                "max_new_tokens": request.max_tokens,
                "sampling_seed": request.seed + i,
                "temperature": max(sampling.temperature, 0.0),
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
            }
            for i in range(request.count)
        ]
        prompts = [request.tokens] * request.count
        body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
        return self.request_json("POST", "/generate", body | options)

    def max_context(self) -> int:
        return self.request_json("GET", "/get_server_info")["context_length"]

    def check_health(self) -> None:
        self.request_json("GET", "/health")

    def read_workers(self) -> Workers:
        info = self.request_json("GET", "/get_server_info")
        return Workers([info["instance"]], [info["weight_version"]], info["max_running_requests"])

    def load_weights(self, update, mode, invalidate, worker_names) -> None:
        folder = {"model_path": update.update_info["path"], "weight_version": update.label}
        try:
            self.request_json("POST", "/pause_generation", {"mode": "retract"})
            loaded = self.request_json("POST", "/update_weights_from_disk", folder)
            if not loaded["success"] or self.read_workers().names != worker_names:
                raise RequestFailed(f"{self.name} did not load {update.label}")
        except BaseException:
            invalidate()
            raise
        finally:
            self.request_json("POST", "/continue_generation", {})


def read_completion(result: dict[str, Any], request: SampleRequest, cfg) -> Completion:
    meta = result["meta_info"]
    finish = meta["finish_reason"]["type"]
    tokens = check_sampled(
        result["output_ids"],
        finish,
        max_tokens=request.max_tokens,
        stop_ids=request.sampling.stop_ids,
        vocab_size=cfg.vocab_size,
    )
    logps = [check_logp(logp, "log-prob") for logp, *_ in meta["output_token_logprobs"]]
    return Completion(tokens, logps, finish, [meta["weight_version"]] * len(tokens), None)
