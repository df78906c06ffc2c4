# SPDX-License-Identifier: Apache-2.0
"""Open the vLLMs of a run: running servers, servers that it starts, or one in this process.

Next: jaxmoe/http_engine/replica.py tracks the weights of each.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxmoe.config import ConfigError, ModelConfig, VllmConfig
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.vllm.client.backend import VllmBackend
from jaxmoe.vllm.client.http_backend import (
    HttpBackend,
    check_requires_key,
    max_body_bytes_per_token,
    read_api_key,
)
from jaxmoe.vllm.engine.expert_format import FullWeights
from jaxmoe.vllm.engine.placement import (
    Placement,
    assign_gpus,
    count_gpus_per_server,
    list_visible_gpus,
    trainer_memory_fraction,
)
from jaxmoe.vllm.engine.served_adapter import ServedAdapter
from jaxmoe.vllm.engine.server import Server, inspect_python

Opened = tuple[VllmBackend, Server | None]


def open_backends(
    cfg: ModelConfig,
    vllm: VllmConfig,
    work: Path,
    context: int,
    rows: int,
    sent: FullWeights | ServedAdapter,
) -> list[Opened]:
    """Return backends of the named servers, of started servers, or of one vLLM in this process.

    Those that are started hold the base of adapters, or experts in four bits, if they can
    (expert_format.py).
    """
    if vllm.urls:
        named: dict[str, Any] = dict(timeout_s=vllm.request_timeout_s)
        named["model"] = sent.served_name
        named["token_bytes"] = max_body_bytes_per_token(cfg)
        key = read_api_key()
        return [(HttpBackend(url, key=key, **named), None) for url in vllm.urls]
    if vllm.launch == 0:
        from jaxmoe.vllm.engine.in_process_backend import InProcessBackend

        sizes: dict[str, Any] = dict(work=work, context=context, rows=rows, sent=sent)
        return [(InProcessBackend(cfg, vllm, **sizes), None)]
    places = [Placement()] * vllm.launch
    if not inspect_python(vllm.python or sys.executable)["cpu"]:
        trainer = trainer_memory_fraction(jax.default_backend() == "gpu")
        places = assign_gpus(
            list_visible_gpus(), vllm.launch, count_gpus_per_server(vllm.args), trainer
        )
    servers = [
        Server(
            vllm,
            cfg,
            work=work,
            number=n,
            context=context,
            rows=rows,
            place=place,
            sent=sent,
        )
        for n, place in enumerate(places)
    ]
    # A vLLM that measures a GPU's free memory must not share the GPU with one that is starting.
    pool = ThreadPoolExecutor(len(servers) if all(p.exclusive for p in places) else 1)
    try:
        jobs = [pool.submit(server.start) for server in servers]
        return [(job.result(), server) for job, server in zip(jobs, servers, strict=True)]
    except BaseException:
        for server in servers:
            server.stop()
        raise
    finally:
        pool.shutdown()


def check_available(opened: list[Opened], needed: int) -> tuple[int, list[VllmBackend]]:
    """Return (context that all answering backends have, backends that do not answer).

    Raises ConfigError if none answers, or one cannot be used.
    """
    contexts, unavailable = list[int](), dict[VllmBackend, str]()
    for backend, _ in opened:
        try:
            contexts.append(check_context(backend, needed))
        except RequestFailed as error:
            unavailable[backend] = str(error)
    if not contexts:
        raise ConfigError(
            f"rollout.vllm.url must name running vLLM servers; {'; '.join(unavailable.values())}. "
            "Try --set rollout.vllm.url= to start one on this machine."
        )
    for reason in unavailable.values():
        print(
            f"! {reason}. The run begins without it and uses it when it answers.", file=sys.stderr
        )
    return min(contexts), list(unavailable)


def check_context(backend: VllmBackend, needed_tokens: int) -> int:
    """Return a vLLM's context in tokens; warns if the vLLM takes commands without a key.

    Raises ConfigError if the context is too small, or if it takes commands without a key and is not
    on this machine; RequestFailed if it does not answer.
    """
    max_context = backend.max_context()
    if isinstance(backend, HttpBackend):
        check_requires_key(backend)
    if max_context < needed_tokens:
        raise ConfigError(
            f"{backend.name} must take the run's context + 1 ({needed_tokens}) tokens, its "
            f"--max-model-len is {max_context}. Start it with --max-model-len {needed_tokens}, or "
            f"have at most {max_context - 1} tokens in rollout.max_context, or without it in "
            "data.max_prompt_tokens + rollout.max_new_tokens."
        )
    return max_context
