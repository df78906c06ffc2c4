# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller of the engine asks for. Back: jaxmoe/http_engine/pooled_engine.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmoe.config import ConfigError
from jaxmoe.records import Prompt, Sampling


@dataclass(frozen=True)
class RequestLimits:
    """Limits of an engine, in tokens."""

    prompt: int  # of the prompt of a row
    new: int  # that are sampled in an answer, or in all turns of an episode
    context: int  # prompt, turns and replies together


def check_request(prompts: Sequence[Prompt], sampling: Sampling, limits: RequestLimits) -> None:
    """Raise ConfigError for requests that these servers cannot handle."""
    if sampling.max_new_tokens > limits.new:
        raise ConfigError(
            f"sampling.max_new_tokens ({sampling.max_new_tokens}) must be at most the "
            f"engine's ({limits.new}). Try --set rollout.max_new_tokens="
            f"{sampling.max_new_tokens}."
        )
    if sampling.max_context > limits.context:
        raise ConfigError(
            f"sampling.max_context ({sampling.max_context}) must be at most the engine's "
            f"({limits.context}). Try --set rollout.max_context={sampling.max_context}."
        )
    max_tokens = max((len(p.tokens) for p in prompts), default=0)
    if max_tokens > limits.prompt:
        raise ConfigError(
            f"prompts must have at most data.max_prompt_tokens tokens, got {max_tokens}. "
            f"Try --set data.max_prompt_tokens={max_tokens}."
        )
    cut = sampling.top_k > 0 or sampling.top_p < 1.0
    if cut and sampling.temperature not in (0.0, 1.0):
        raise ConfigError(
            f"rollout.temperature must be 1 if top_k ({sampling.top_k}) or top_p "
            f"({sampling.top_p}) truncate on these servers, got "
            f"{sampling.temperature}: they do not return the truncated mass at another "
            "temperature. Try --set rollout.temperature=1.0, or --set rollout.top_k=0 --set "
            "rollout.top_p=1.0."
        )
