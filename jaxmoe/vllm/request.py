# SPDX-License-Identifier: Apache-2.0
"""One request's samples: what is sent, and how a sample that was cut off is continued.

A sample that vLLM aborted for a weight sync goes on from its tokens so far; each completion keeps
the log-probs and the weight labels it was sampled with. Next: jaxmoe/vllm/responses.py checks them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm.responses import Completion, ExpectedResponse, completions, prompt_logps

CONTINUED = 64  # completions of one sample, at most: a sync in every second token is a mistake


@dataclass(frozen=True)
class PromptRequest:
    """What one request asks for: samples first… of prompt number `index`."""

    index: int
    prompt: Prompt
    first: int
    count: int


def request_seed(seed: int, *numbers: int) -> int:
    """62 random bits of (seed, prompt index, …): no sample depends on its companions."""
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1, np.uint64)[0] >> 2)


def request_body(
    tokens: list[int], sampling: Sampling, *, count: int, max_tokens: int, seed: int
) -> dict[str, Any]:
    """A request for `count` samples; sample i of it draws from seed + i."""
    greedy = sampling.temperature <= 0.0
    return {
        "token_ids": tokens,
        "sampling_params": {
            "n": count, "max_tokens": max_tokens, "seed": seed, "logprobs": 0,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_k": 0 if greedy else sampling.top_k, "top_p": 1.0 if greedy else sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True, "detokenize": False,
        },
    }  # fmt: skip


def score(backend: Backend, tokens: list[int], cfg: ModelConfig) -> tuple[np.ndarray, str]:
    """The engine's log-prob of each given token at temperature 1, and its weights' label."""
    one = Sampling(1, (), temperature=0.0)
    body = request_body(tokens, one, count=1, max_tokens=1, seed=0)
    body["sampling_params"]["prompt_logprobs"] = 0
    response = backend.generate(body)
    (completion,) = completions(response, ExpectedResponse(len(tokens), 1, 1, frozenset()), cfg)
    if not completion.labels:
        raise RequestFailed("a scoring request was aborted")
    return prompt_logps(response, tokens, cfg), completion.labels[0]


def sample(
    backend: Backend, request: PromptRequest, sampling: Sampling, seed: int, cfg: ModelConfig
) -> list[Completion]:
    """The request's samples, each whole; `finish` is stop or length.

    Raises RequestFailed for a response that is not what was asked for.
    """
    prompt = list(request.prompt.tokens)
    start = request_seed(seed, request.index) + request.first
    # greedy samples are all alike, and vLLM takes only one of them
    count = 1 if sampling.temperature <= 0.0 else request.count
    most = sampling.max_new_tokens
    body = request_body(prompt, sampling, count=count, max_tokens=most, seed=start)
    expected = ExpectedResponse(len(prompt), count, most, frozenset(sampling.stop_ids))
    found = completions(backend.generate(body), expected, cfg)
    numbers = seed, request.index
    whole = [
        _continued(backend, prompt, completion, sampling, (*numbers, request.first + i), cfg)
        for i, completion in enumerate(found)
    ]
    return whole * request.count if count < request.count else whole


def _continued(
    backend: Backend, prompt: list[int], completion: Completion, sampling: Sampling,
    numbers: tuple[int, int, int], cfg: ModelConfig,
) -> Completion:  # fmt: skip
    for part in range(1, CONTINUED):
        if completion.finish != "abort":
            return completion
        tokens, left = prompt + completion.tokens, sampling.max_new_tokens - len(completion.tokens)
        if left == 0:  # aborted in the moment of its last token
            last = Completion([], [], "length", [], completion.experts)
            return _joined(completion, last, len(prompt))
        seed = request_seed(*numbers, part)
        body = request_body(tokens, sampling, count=1, max_tokens=left, seed=seed)
        expected = ExpectedResponse(len(tokens), 1, left, frozenset(sampling.stop_ids))
        (more,) = completions(backend.generate(body), expected, cfg)
        completion = _joined(completion, more, len(prompt))
    raise RequestFailed(f"a sample was aborted {CONTINUED} times: are weights synced without end?")


def _joined(completion: Completion, more: Completion, prompt: int) -> Completion:
    """Both, in order; the experts of a token are those of the completion that read it first."""
    experts = None
    if not completion.tokens:
        experts = more.experts
    elif completion.experts is not None and more.experts is not None:
        seen = prompt + len(completion.tokens) - 1
        experts = np.concatenate([completion.experts[:seen], more.experts[seen:]])
    return Completion(
        completion.tokens + more.tokens, completion.logp + more.logp, more.finish,
        completion.labels + more.labels, experts,
    )  # fmt: skip
