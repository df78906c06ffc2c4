# SPDX-License-Identifier: Apache-2.0
"""A vLLM as the `Backend` of a pool, by its routes.

Next: responses.py checks what it samples; sync.py sends weights to it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.http_engine.backend import Backend, Completion, RequestFailed, SampleRequest, Workers
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.responses import (
    ExpectedResponse,
    parse_completions,
    parse_prompt_logps,
)
from jaxmoe.vllm.client.routes import VllmRoutes
from jaxmoe.vllm.client.sync import read_workers, transfer_weights
from jaxmoe.weight_sync.update import WeightUpdate


class VllmBackend(VllmRoutes, Backend):
    """The part of a `Backend` that follows from the routes."""

    def sample(self, request: SampleRequest, cfg: ModelConfig) -> list[Completion]:
        response = self.generate(request_body(request))
        return parse_completions(response, expect_response(request), cfg)

    def score_tokens(self, tokens: list[int], cfg: ModelConfig) -> tuple[np.ndarray, str]:
        # vLLM computes log-probs of a prompt at temperature 1, whatever the temperature of the
        # request is.
        request = SampleRequest(tokens, 1, 1, 0, Sampling(1, (), temperature=0.0))
        body = request_body(request)
        body["sampling_params"]["prompt_logprobs"] = 0
        response = self.generate(body)
        (completion,) = parse_completions(response, expect_response(request), cfg)
        if not completion.labels:
            raise RequestFailed("a scoring request was aborted")
        return parse_prompt_logps(response, tokens), completion.labels[0]

    def read_workers(self) -> Workers:
        return read_workers(self)

    def load_weights(
        self,
        update: WeightUpdate,
        mode: str,
        invalidate: Callable[[], None],
        worker_names: list[str],
    ) -> None:
        transfer_weights(self, update, mode, invalidate, worker_names)


def request_body(request: SampleRequest) -> dict[str, Any]:
    """Return the body of a request."""
    sampling = request.sampling
    greedy = sampling.temperature <= 0.0
    return {
        "token_ids": request.tokens,
        "sampling_params": {
            "n": request.count,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "logprobs": 0,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_k": 0 if greedy else sampling.top_k,
            "top_p": 1.0 if greedy else sampling.top_p,
            # Only the run's stop tokens end a response, whatever the model's config says. vLLM is
            # started without a tokenizer.
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,
            "detokenize": False,
        },
    }


def expect_response(request: SampleRequest) -> ExpectedResponse:
    return ExpectedResponse(
        len(request.tokens),
        request.count,
        request.max_tokens,
        frozenset(request.sampling.stop_ids),
    )
