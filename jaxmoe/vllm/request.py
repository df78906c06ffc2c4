# SPDX-License-Identifier: Apache-2.0
"""One request's samples: what is sent, and how an answer that was cut off is continued.

A sample that vLLM aborted for a swap goes on from its tokens so far; its pieces keep the log-probs
and the weights' labels they were sampled with. Next: jaxmoe/vllm/responses.py checks them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.backend import Backend, Unanswered
from jaxmoe.vllm.responses import Asked, Piece, pieces, prompt_logps

CONTINUED = 64  # pieces of one sample, at most: a swap in every second token is a mistake


@dataclass(frozen=True)
class Unit:
    """What one request asks for: samples first… of prompt number `index`."""

    index: int
    prompt: Prompt
    first: int
    count: int


def request_seed(seed: int, *numbers: int) -> int:
    """62 random bits of (seed, prompt index, …): no answer depends on its companions."""
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1, np.uint64)[0] >> 2)


def body(
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
    request = body(tokens, one, count=1, max_tokens=1, seed=0)
    request["sampling_params"]["prompt_logprobs"] = 0
    answer = backend.generate(request)
    (piece,) = pieces(answer, Asked(len(tokens), 1, 1, frozenset()), cfg)
    if not piece.labels:
        raise Unanswered("a scoring request was aborted")
    return prompt_logps(answer, tokens, cfg), piece.labels[0]


def sample(
    backend: Backend, unit: Unit, sampling: Sampling, seed: int, cfg: ModelConfig
) -> list[Piece]:
    """The unit's samples, each whole; `finish` is stop or length.

    Raises Unanswered for an answer that is not what was asked for.
    """
    prompt = list(unit.prompt.tokens)
    start = request_seed(seed, unit.index) + unit.first
    # greedy samples are all alike, and vLLM takes only one of them
    count = 1 if sampling.temperature <= 0.0 else unit.count
    request = body(prompt, sampling, count=count, max_tokens=sampling.max_new_tokens, seed=start)
    asked = Asked(len(prompt), count, sampling.max_new_tokens, frozenset(sampling.stop_ids))
    found = pieces(backend.generate(request), asked, cfg)
    whole = [
        _continued(backend, prompt, piece, sampling, (seed, unit.index, unit.first + i), cfg)
        for i, piece in enumerate(found)
    ]
    return whole * unit.count if count < unit.count else whole


def _continued(
    backend: Backend, prompt: list[int], piece: Piece, sampling: Sampling,
    numbers: tuple[int, int, int], cfg: ModelConfig,
) -> Piece:  # fmt: skip
    for part in range(1, CONTINUED):
        if piece.finish != "abort":
            return piece
        tokens, left = prompt + piece.tokens, sampling.max_new_tokens - len(piece.tokens)
        if left == 0:  # aborted in the moment of its last token
            return _joined(piece, Piece([], [], "length", [], piece.experts), len(prompt))
        seed = request_seed(*numbers, part)
        request = body(tokens, sampling, count=1, max_tokens=left, seed=seed)
        asked = Asked(len(tokens), 1, left, frozenset(sampling.stop_ids))
        (more,) = pieces(backend.generate(request), asked, cfg)
        piece = _joined(piece, more, len(prompt))
    raise Unanswered(f"a sample was aborted {CONTINUED} times: are weights swapped without end?")


def _joined(piece: Piece, more: Piece, prompt: int) -> Piece:
    """Both, in order; the experts of a token are those of the piece that read it first."""
    experts = None
    if not piece.tokens:
        experts = more.experts
    elif piece.experts is not None and more.experts is not None:
        seen = prompt + len(piece.tokens) - 1
        experts = np.concatenate([piece.experts[:seen], more.experts[seen:]])
    return Piece(
        piece.tokens + more.tokens, piece.logp + more.logp, more.finish,
        piece.labels + more.labels, experts,
    )  # fmt: skip
