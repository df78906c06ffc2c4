# SPDX-License-Identifier: Apache-2.0
"""The samples of one request: its body, and how an aborted sample is continued.

A sample that vLLM aborted for a weight sync continues from its tokens so far; each completion keeps
the log-probs and weight labels it was sampled with. Next: jaxmoe/vllm/client/responses.py checks
the responses.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.client.backend import Backend, RequestFailed
from jaxmoe.vllm.client.responses import (
    Completion,
    ExpectedResponse,
    parse_completions,
    parse_prompt_logps,
)

MAX_COMPLETIONS = 64  # of one sample; more mean that weights are synced too often


@dataclass(frozen=True)
class PromptRequest:
    """A request for `count` samples, from number `first` on, of prompt number `index`.

    Of an episode it is one turn of the policy, and `before` are the tokens between the prompt and
    this turn.
    """

    index: int
    prompt: Prompt
    first: int
    count: int
    turn: int = 0
    before: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens that vLLM reads."""
        return [*self.prompt.tokens, *self.before]

    def seed_numbers(self, sample: int) -> tuple[int, ...]:
        """Return what distinguishes the random numbers of a sample's turns and continuations."""
        return self.index, sample, *((0, self.turn) if self.turn else ())


def request_seed(seed: int, *numbers: int) -> int:
    """Return 62 random bits of (seed, prompt index, …): samples do not depend on the batch."""
    # Two bits of room, so that seed + i of every sample is a signed 64-bit integer.
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1, np.uint64)[0] >> 2)


def request_body(
    tokens: list[int], sampling: Sampling, *, count: int, max_tokens: int, seed: int
) -> dict[str, Any]:
    """Return the body of a request for `count` samples; sample i uses seed + i."""
    greedy = sampling.temperature <= 0.0
    return {
        "token_ids": tokens,
        "sampling_params": {
            "n": count,
            "max_tokens": max_tokens,
            "seed": seed,
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


def score_tokens(backend: Backend, tokens: list[int], cfg: ModelConfig) -> tuple[np.ndarray, str]:
    """Return the engine's log-prob of each given token at temperature 1, and its weights' label."""
    # vLLM computes log-probs of a prompt at temperature 1, whatever the temperature of the request
    # is.
    sampling = Sampling(1, (), temperature=0.0)
    body = request_body(tokens, sampling, count=1, max_tokens=1, seed=0)
    body["sampling_params"]["prompt_logprobs"] = 0
    response = backend.generate(body)
    expected = ExpectedResponse(len(tokens), 1, 1, frozenset())
    (completion,) = parse_completions(response, expected, cfg)
    if not completion.labels:
        raise RequestFailed("a scoring request was aborted")
    return parse_prompt_logps(response, tokens, cfg), completion.labels[0]


def sample_completions(
    backend: Backend, request: PromptRequest, sampling: Sampling, seed: int, cfg: ModelConfig
) -> list[Completion]:
    """Return the request's samples, each complete; `finish` is stop or length.

    Raises RequestFailed for a response that does not fit the request.
    """
    prompt = request.tokens
    start = request_seed(seed, request.index) + request.first
    if request.turn:
        start = request_seed(seed, *request.seed_numbers(request.first))
    # Greedy samples are identical, and vLLM accepts only n=1 for them.
    count = 1 if sampling.temperature <= 0.0 else request.count
    max_tokens = sampling.max_new_tokens
    body = request_body(prompt, sampling, count=count, max_tokens=max_tokens, seed=start)
    expected = ExpectedResponse(len(prompt), count, max_tokens, frozenset(sampling.stop_ids))
    completions = parse_completions(backend.generate(body), expected, cfg)
    finished = [
        _continue_completion(
            backend, prompt, x, sampling, (seed, *request.seed_numbers(request.first + i)), cfg
        )
        for i, x in enumerate(completions)
    ]
    return finished * request.count if count < request.count else finished


def _continue_completion(
    backend: Backend,
    prompt: list[int],
    completion: Completion,
    sampling: Sampling,
    numbers: tuple[int, ...],
    cfg: ModelConfig,
) -> Completion:
    for part in range(1, MAX_COMPLETIONS):
        if completion.finish != "abort":
            return completion
        tokens = prompt + completion.tokens
        n_remaining = sampling.max_new_tokens - len(completion.tokens)
        if n_remaining == 0:  # aborted just after its last token
            last = Completion([], [], "length", [], completion.experts)
            return _join_completions(completion, last, len(prompt))
        # With the seed of the first part, the continuation would repeat its random numbers.
        seed = request_seed(*numbers, part)
        body = request_body(tokens, sampling, count=1, max_tokens=n_remaining, seed=seed)
        expected = ExpectedResponse(len(tokens), 1, n_remaining, frozenset(sampling.stop_ids))
        (continuation,) = parse_completions(backend.generate(body), expected, cfg)
        completion = _join_completions(completion, continuation, len(prompt))
    raise RequestFailed(f"a sample was aborted {MAX_COMPLETIONS} times: are syncs too frequent?")


def _join_completions(completion: Completion, continuation: Completion, prompt: int) -> Completion:
    """Return both in order; a token's experts are those of the completion that read it first."""
    experts = None
    if not completion.tokens:
        experts = continuation.experts
    elif completion.experts is not None and continuation.experts is not None:
        n_read = prompt + len(completion.tokens) - 1
        experts = np.concatenate([completion.experts[:n_read], continuation.experts[n_read:]])
    return Completion(
        completion.tokens + continuation.tokens,
        completion.logp + continuation.logp,
        continuation.finish,
        completion.labels + continuation.labels,
        experts,
    )
