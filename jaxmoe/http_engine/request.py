# SPDX-License-Identifier: Apache-2.0
"""The samples of one request: their seeds, and how an aborted sample is continued.

A sample that a server aborted for a weight sync continues from its tokens so far; each completion
keeps the log-probs and weight labels it was sampled with. Next: jaxmoe/http_engine/completions.py
checks the responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.http_engine.backend import Backend, Completion, RequestFailed, SampleRequest
from jaxmoe.records import Prompt, Sampling

MAX_COMPLETIONS = 64  # of one sample; more mean that weights are synced too often


@dataclass(frozen=True)
class PromptRequest:
    """A request for `count` samples, from number `first` on, of prompt number `index`.

    Of an episode it is one turn of the policy, and `context` are all tokens that it reads.
    """

    index: int
    prompt: Prompt
    first: int
    count: int
    turn: int = 0
    context: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens that the server reads."""
        return list(self.context or self.prompt.tokens)

    def seed_numbers(self, sample: int) -> tuple[int, ...]:
        """Return what distinguishes the random numbers of a sample's turns and continuations."""
        return self.index, sample, *((0, self.turn) if self.turn else ())


def request_seed(seed: int, *numbers: int) -> int:
    """Return 62 random bits of (seed, prompt index, …): samples do not depend on the batch."""
    # Two bits of room, so that seed + i of every sample is a signed 64-bit integer.
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1, np.uint64)[0] >> 2)


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
    # Greedy samples are identical, and some servers accept only one of them.
    count = 1 if sampling.temperature <= 0.0 else request.count
    sample = SampleRequest(prompt, count, sampling.max_new_tokens, start, sampling)
    completions = _sample_checked(backend, sample, cfg)
    finished = [
        _continue_completion(
            backend, prompt, x, sampling, (seed, *request.seed_numbers(request.first + i)), cfg
        )
        for i, x in enumerate(completions)
    ]
    return finished * request.count if count < request.count else finished


def _sample_checked(
    backend: Backend, sample: SampleRequest, cfg: ModelConfig
) -> Sequence[Completion]:
    """Return a backend's completions. Raises RequestFailed for another number, or lengths."""
    completions = backend.sample(sample, cfg)
    sizes = [(len(x.tokens), len(x.logp)) for x in completions]
    if len(completions) != sample.count or any(tokens != logps for tokens, logps in sizes):
        raise RequestFailed(
            f"a response must have {sample.count} samples with a log-prob for each token; got "
            f"(tokens, log-probs) {sizes[:8]}"
        )
    return completions


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
        continued = SampleRequest(tokens, 1, n_remaining, seed, sampling)
        (continuation,) = _sample_checked(backend, continued, cfg)
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
