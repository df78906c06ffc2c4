# SPDX-License-Identifier: Apache-2.0
"""vLLM's responses, checked before use. An invalid field raises RequestFailed, which names it.

Next: jaxmoe/http_engine/request.py joins the completions of a sample.
"""

import base64
import binascii
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.http_engine.backend import Completion, RequestFailed
from jaxmoe.http_engine.completions import check_logp, check_sampled
from jaxmoe.http_engine.strict_json import format_value
from jaxmoe.losses.distillation import NO_WORD
from jaxmoe.recorded_experts import mark_unknown_experts

SUM_ROUNDING = 1e-3  # rounded probabilities may add up to this much above 1


@dataclass(frozen=True)
class ExpectedResponse:
    """The sizes and stop tokens that a response must have."""

    prompt_tokens: int
    samples: int
    max_tokens: int
    stop_ids: frozenset[int]


def parse_completions(
    response: Any, expected: ExpectedResponse, cfg: ModelConfig
) -> list[Completion]:
    """Return the choices in the order of the samples, all of them checked."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise RequestFailed(f"a response must have a list of choices; got {format_value(response)}")
    if len(choices) != expected.samples:
        raise RequestFailed(f"asked for {expected.samples} samples of a prompt, got {len(choices)}")
    if not all(type(c.get("index")) is int for c in choices):
        raise RequestFailed("every choice must have a number, its index")
    by_index = {c["index"]: c for c in choices}
    if by_index.keys() != set(range(expected.samples)):
        raise RequestFailed(
            f"choices must be numbered 0 to {expected.samples - 1}, got "
            f"{format_value([c.get('index') for c in choices])}"
        )
    return [_parse_completion(by_index[i], expected, cfg) for i in range(expected.samples)]


def parse_prompt_logps(response: Any, tokens: list[int]) -> np.ndarray:
    """Return float32 [T]: the log-prob of each given token at temperature 1; 0 for the first."""
    rows = response.get("prompt_logprobs") if isinstance(response, dict) else None
    if not isinstance(rows, list) or len(rows) != len(tokens):
        actual = len(rows) if isinstance(rows, list) else format_value(rows)
        raise RequestFailed(f"prompt_logprobs must have {len(tokens)} entries, got {actual}")
    logps = [0.0]
    for i, (row, token) in enumerate(zip(rows[1:], tokens[1:], strict=True), start=1):
        # Keys of JSON are texts; a vLLM in this process returns integers.
        entry = row.get(str(token), row.get(token)) if isinstance(row, dict) else None
        if not isinstance(entry, dict):
            raise RequestFailed(f"prompt_logprobs[{i}] must have token {token}")
        logps.append(check_logp(entry.get("logprob"), f"prompt_logprobs[{i}]"))
    return np.asarray(logps, np.float32)


def parse_prompt_lists(
    response: Any, tokens: list[int], top_k: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return int32 and float32 [T, K]: the likeliest words at each token, likeliest first, and
    their log-probs; no word at the first token. `parse_prompt_logps` has accepted the response."""
    ids_TK = np.full((len(tokens), top_k), -1, np.int32)
    logp_TK = np.full(ids_TK.shape, NO_WORD, np.float32)
    for i in range(1, len(tokens) if top_k else 0):
        row, field = response["prompt_logprobs"][i], f"prompt_logprobs[{i}]"
        try:
            ranked = sorted(
                (entry["rank"], int(word), check_logp(entry["logprob"], field))
                for word, entry in row.items()
                if entry["rank"] <= top_k
            )
        except (KeyError, TypeError, ValueError):
            raise RequestFailed(f"{field} must have an id, a rank and a log-prob a word") from None
        ranks, ids, logps = ([entry[n] for entry in ranked] for n in range(3))
        problem = ""
        # The prompt's own token is one more, if it is not among the likeliest.
        if ranks != [*range(1, top_k + 1)] or len(row) != top_k + (tokens[i] not in ids):
            problem = f"the {top_k} likeliest words by rank, and the prompt's token"
        elif len({*ids}) < top_k or min(ids) < 0 or max(ids) >= vocab_size:
            problem = f"different ids below {vocab_size}"
        elif sum(map(math.exp, logps)) > 1 + SUM_ROUNDING or logps != sorted(logps, reverse=True):
            problem = "falling log-probs, of probabilities that add up to at most 1"
        if problem:
            raise RequestFailed(f"{field} must have {problem}, got {format_value(ranked)}")
        ids_TK[i], logp_TK[i] = ids, logps
    return ids_TK, logp_TK


def _parse_completion(
    choice: dict[str, Any], expected: ExpectedResponse, cfg: ModelConfig
) -> Completion:
    finish = choice.get("finish_reason")
    tokens = check_sampled(
        choice.get("token_ids"),
        finish,
        max_tokens=expected.max_tokens,
        stop_ids=expected.stop_ids,
        vocab_size=cfg.vocab_size,
    )
    aborted = finish == "abort"
    read = expected.prompt_tokens + len(tokens) - 1  # all but the last token
    return Completion(
        tokens,
        _parse_logps(choice.get("logprobs"), tokens),
        str(finish),
        _parse_labels(choice.get("weight_versions"), len(tokens)),
        _parse_experts(choice.get("routed_experts"), read, aborted, cfg, expected.prompt_tokens),
    )


def _parse_logps(logprobs: Any, tokens: list[int]) -> list[float]:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    content = content if content is not None else []
    if not isinstance(content, list) or len(content) != len(tokens):
        actual = len(content) if isinstance(content, list) else format_value(content)
        raise RequestFailed(f"{len(tokens)} tokens must have as many log-probs, got {actual}")
    logps = []
    for i, (entry, token) in enumerate(zip(content, tokens, strict=True)):
        if not isinstance(entry, dict) or entry.get("token_id") != token:
            raise RequestFailed(f"log-prob {i} must be of token {token}, is {format_value(entry)}")
        logps.append(check_logp(entry.get("logprob"), f"log-prob {i}"))
    return logps


def _parse_labels(spans: Any, count: int) -> list[str]:
    labels: list[str] = []
    for span in spans if isinstance(spans, list) else []:
        ok = isinstance(span, dict) and isinstance(span.get("version"), str)
        ok = ok and type(span.get("start")) is int and type(span.get("end")) is int
        if not ok or not len(labels) == span["start"] <= span["end"]:
            raise RequestFailed(
                f"weight_versions must be spans without gaps, got {format_value(spans)}"
            )
        # The end is untrusted: cut, it cannot fill the memory, and one label too many is still
        # refused below.
        labels += [span["version"]] * (min(span["end"], count + 1) - len(labels))
    if len(labels) != count:
        raise RequestFailed(f"weight_versions must cover {count} tokens, got {format_value(spans)}")
    return labels


def read_npy(raw: bytes) -> np.ndarray:
    """Return an array of integers or floats in numpy's file format. Raises ValueError.

    np.load parses the header with `ast`, which in Python 3.11 fails in concurrent threads.
    """
    if len(raw) < 12 or raw[:6] != b"\x93NUMPY" or raw[6] not in (1, 2, 3):
        raise ValueError(f"it begins with {raw[:12]!r}")
    start = 10 if raw[6] == 1 else 12
    end = start + int.from_bytes(raw[8:start], "little")
    header = re.fullmatch(
        r"\{'descr': '([<>|=]?[iuf]\d+)', 'fortran_order': (True|False), "
        r"'shape': \(([\d, ]*)\), \}\s*",
        raw[start:end].decode("latin1"),
    )
    if header is None:
        raise ValueError(f"its header is {raw[start:end][:80]!r}")
    shape = tuple(int(n) for n in header[3].split(",") if n.strip())
    array = np.frombuffer(raw, np.dtype(header[1]), math.prod(shape), end)
    return array.reshape(shape, order="F" if header[2] == "True" else "C")


def _parse_experts(
    encoded: Any, rows: int, aborted: bool, cfg: ModelConfig, prompt_tokens: int
) -> np.ndarray | None:
    if encoded is None:
        return None
    try:
        array = read_npy(base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError, TypeError, OverflowError) as error:
        raise RequestFailed(f"routed_experts must be base64 of an .npy: {error}") from error
    shape = (rows, cfg.n_layers, cfg.experts_per_token)
    if array.shape != shape and aborted:
        return None  # the continuation's experts do not cover these tokens
    if array.shape != shape or array.dtype.kind not in "ui":
        raise RequestFailed(
            f"routed_experts must be whole numbers of shape {shape}, got {array.dtype} of shape "
            f"{array.shape}"
        )
    try:
        return mark_unknown_experts(array, n_experts=cfg.n_experts, prompt_tokens=prompt_tokens)
    except ValueError as error:
        raise RequestFailed(f"routed_experts: {error}") from error
