# SPDX-License-Identifier: Apache-2.0
"""A teacher behind a vLLM's URL: the log-probs of given tokens, by its OpenAI-compatible routes.

Any vLLM serves them: POST /v1/completions with the tokens of a complete sequence as the prompt and
prompt_logprobs=K, which adds the K likeliest words at each token, and POST /tokenize. The server is
not trusted: what it answers is checked, and a row without usable log-probs is not trained on.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmoe.batches.batch import Batch, find_contexts
from jaxmoe.config import Config, ConfigError, EngineError
from jaxmoe.data.same_tokenizer import find_encoding_difference
from jaxmoe.data.tokenizer import Tokenizer, load_tokenizer
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.json_client import MAX_BODY_BYTES, JsonClient
from jaxmoe.http_engine.strict_json import format_value
from jaxmoe.losses.distillation import NO_WORD
from jaxmoe.vllm.client.responses import parse_prompt_lists, parse_prompt_logps

KEY_VARIABLE = "JAXMOE_TEACHER_API_KEY"
REQUESTS = 32  # at a time; the server queues what it cannot compute at once
TOKEN_BYTES = 1024  # of a response, for each word; vLLM writes about 100
START_TIMEOUT_S = 60.0  # of a request before the run

Scores = tuple[np.ndarray, np.ndarray, np.ndarray]  # of a row: `TeacherServer.score_tokens`


@dataclass(frozen=True)
class TeacherServer:
    """A vLLM that scores tokens: its URL, and the model that it serves."""

    url: str
    timeout_s: float  # of all requests for a row
    model: str = ""
    top_k: int = 0  # words that it lists at each token
    vocab_size: int = 0  # of the policy

    def open_client(self, timeout_s: float) -> JsonClient:
        """Return a client; the caller closes it."""
        key = os.environ.get(KEY_VARIABLE, "")
        return JsonClient(
            self.url,
            timeout_s=timeout_s,
            key=key,
            key_variable=KEY_VARIABLE,
        )

    def digest(self) -> dict[str, str]:
        """Return the model's name by its key in a checkpoint: a resumed run may have another URL
        of the same model."""
        return {"distill.teacher": f"served {self.model}"}

    def score_batch(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Return the batch with teacher_logp_BT and the listed words, and the metric of its lost
        rows.

        A row for which the server does not answer in time, or with anything but the log-probs of
        its tokens, is taken out of the loss; it still counts as a member of its group, except where
        turns have their own credit.
        Raises EngineError if no row is left.
        """
        tokens_BT, mask_BT = np.asarray(batch.tokens_BT), np.asarray(batch.loss_mask_BT)
        trained = [
            (b, start, end)
            for b, start, end in find_contexts(np.asarray(batch.segment_ids_BT))
            if mask_BT[b, start:end].any()
        ]
        rows = [tokens_BT[b, start:end].tolist() for b, start, end in trained]
        with closing(self.open_client(self.timeout_s)) as client:
            with ThreadPoolExecutor(REQUESTS) as threads:
                scores = list(threads.map(lambda row: self.score_or_fail(client, row), rows))
        logp_BT, is_lost_B = np.zeros(tokens_BT.shape, np.float32), np.zeros(len(mask_BT), bool)
        ids_BTK = np.full((*tokens_BT.shape, self.top_k), -1, np.int32)
        top_logp_BTK = np.full(ids_BTK.shape, NO_WORD, np.float32)
        for (b, start, end), score in zip(trained, scores, strict=True):
            if isinstance(score, RequestFailed):
                is_lost_B[b] = True
            else:
                is_trained_T = mask_BT[b, start:end]
                for x_BT, x_T in zip((logp_BT, ids_BTK, top_logp_BTK), score, strict=True):
                    x_BT[b, start:end][is_trained_T] = x_T[is_trained_T]
        failures = [score for score in scores if isinstance(score, RequestFailed)]
        if failures and len(failures) == len(scores):
            raise EngineError(
                f"distill.teacher must score the answers; of the {len(scores)} of this step none "
                f"has log-probs of {self.url}: {failures[0]}. Nothing was trained on. Start the "
                "server again, and type the same command."
            )
        batch = replace(batch, loss_mask_BT=mask_BT & ~is_lost_B[:, None], teacher_logp_BT=logp_BT)
        if self.top_k:
            batch = replace(batch, teacher_top_ids_BTK=ids_BTK, teacher_top_logp_BTK=top_logp_BTK)
        return batch, {"distill/lost_rows": float(is_lost_B.sum())}

    def score_or_fail(self, client: JsonClient, tokens: list[int]) -> Scores | RequestFailed:
        """Return `score_tokens` of a row, or why there are none; a failed request is sent again,
        within the same time."""
        deadline = time.monotonic() + self.timeout_s
        try:
            return self.score_tokens(client, tokens, self.timeout_s)
        except RequestFailed as failure:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return failure
        try:
            return self.score_tokens(client, tokens, remaining_s)
        except RequestFailed as failure:
            return failure

    def score_tokens(
        self, client: JsonClient, tokens: list[int], timeout_s: float | None = None
    ) -> Scores:
        """Return float32 [T], the log-prob of each token given those before it, 0 for the first;
        and the ids and log-probs [T, K] of the likeliest words there.

        Raises RequestFailed.
        """
        # vLLM samples at least one token; it computes log-probs of a prompt at temperature 1.
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.top_k,
        }
        response = client.request_json(
            "POST",
            "/v1/completions",
            body,
            timeout_s=timeout_s,
            max_body_bytes=MAX_BODY_BYTES + TOKEN_BYTES * len(tokens) * (1 + self.top_k),
        )
        choices = response.get("choices") if isinstance(response, dict) else None
        if (
            not isinstance(choices, list)
            or len(choices) != 1
            or response.get("model") != self.model
        ):
            raise RequestFailed(
                f"{self.url}/v1/completions must answer with one choice of {self.model}, got "
                f"{format_value(response)}"
            )
        logp_T = parse_prompt_logps(choices[0], tokens)
        return logp_T, *parse_prompt_lists(choices[0], tokens, self.top_k, self.vocab_size)


def open_teacher_server(cfg: Config) -> TeacherServer:
    """Return the server of `distill.teacher`, which has the run's tokenizer and scores tokens.

    Raises ConfigError if it does not answer, serves no model with the run's context and tokenizer,
    or returns no log-probs of a prompt.
    """
    url = cfg.distill.teacher.rstrip("/").removesuffix("/v1")
    top_k, vocab_size = cfg.distill.top_k, cfg.model.vocab_size
    server = TeacherServer(url, cfg.distill.timeout_s, top_k=top_k, vocab_size=vocab_size)
    tokenizer = load_tokenizer(cfg.init.tokenizer, cfg.init.checkpoint)
    try:
        with closing(server.open_client(min(START_TIMEOUT_S, server.timeout_s))) as client:
            name, context = read_served_model(client)
            server = replace(server, model=name)
            check_served_tokenizer(client, name, tokenizer)
            server.score_tokens(client, tokenizer.encode("A short text."))
    except RequestFailed as error:
        raise ConfigError(
            f"distill.teacher={url} must be a vLLM that returns log-probs of a prompt; {error}. "
            "Start one with: vllm serve MODEL" + (f" --max-logprobs {top_k}" if top_k else "")
        ) from error
    # A row is followed by the one token that the server samples.
    if context <= cfg.read_context:
        raise ConfigError(
            f"distill.teacher={url} must read sequences of {cfg.read_context:,} tokens and one "
            f"more; {name} has at most {context:,}. Start it with --max-model-len "
            f"{cfg.read_context + 1}."
        )
    return server


def read_served_model(client: JsonClient) -> tuple[str, int]:
    """Return the name of the only or first model, and its longest context.

    Raises RequestFailed.
    """
    models = client.request_json("GET", "/v1/models")
    try:
        name, context = models["data"][0]["id"], models["data"][0]["max_model_len"]
    except (KeyError, IndexError, TypeError):
        name, context = None, None
    if not isinstance(name, str) or type(context) is not int:
        raise RequestFailed(f"{client.name}/v1/models names no model with its max_model_len")
    return name, context


def check_served_tokenizer(client: JsonClient, model: str, tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless the server's tokenizer gives sample texts the run's ids, and
    RequestFailed if it does not answer."""

    def encode(text: str) -> Sequence[int]:
        body: dict[str, Any] = {"model": model, "prompt": text, "add_special_tokens": False}
        response = client.request_json("POST", "/tokenize", body)
        tokens = response.get("tokens") if isinstance(response, dict) else None
        if not isinstance(tokens, list):
            raise RequestFailed(f"{client.name}/tokenize returned {format_value(response)}")
        return tokens

    if problem := find_encoding_difference(tokenizer, encode):
        raise ConfigError(
            f"distill.teacher must have the policy's tokenizer; that of {client.name} differs: "
            f"{problem}. Try another teacher."
        )
