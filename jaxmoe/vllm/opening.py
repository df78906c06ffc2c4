# SPDX-License-Identifier: Apache-2.0
"""The vLLMs that a run samples from: servers that run, servers that are started, or one in here.

Next: jaxmoe/vllm/replica.py keeps each with its weights.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxmoe.config import ConfigError, ModelConfig, VllmConfig
from jaxmoe.vllm.adapter import ServedAdapter
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm.http_backend import (
    HttpBackend,
    body_bytes_per_token,
    check_guarded,
    key_of_running_servers,
)
from jaxmoe.vllm.placement import (
    Placement,
    gpus_each,
    placements,
    trainer_share,
    visible_gpus,
)
from jaxmoe.vllm.server import Server, inspect_python
from jaxmoe.vllm_plugin.names import ADAPTER

Opened = tuple[Backend, Server | None]


def open_backends(
    cfg: ModelConfig, vllm: VllmConfig, work: Path, context: int, rows: int,
    adapter: ServedAdapter | None = None,
) -> list[Opened]:  # fmt: skip
    """The running servers named, or servers started, or one vLLM in this process.

    With `adapter` they serve adapters over its base.
    """
    if vllm.urls:
        named: dict[str, Any] = dict(timeout_s=vllm.request_timeout_s, connections=rows)
        named["model"] = "" if adapter is None else ADAPTER
        named["token_bytes"] = body_bytes_per_token(cfg)
        key = key_of_running_servers()
        return [(HttpBackend(url, key=key, **named), None) for url in vllm.urls]
    if vllm.launch == 0:
        from jaxmoe.vllm.in_process import InProcessBackend

        sizes: dict[str, Any] = dict(work=work, context=context, rows=rows)
        return [(InProcessBackend(cfg, vllm, adapter=adapter, **sizes), None)]
    places = [Placement()] * vllm.launch
    if not inspect_python(vllm.python or sys.executable)["cpu"]:
        trainer = trainer_share(jax.default_backend() == "gpu")
        places = placements(visible_gpus(), vllm.launch, gpus_each(vllm.args), trainer)
    servers = [
        Server(
            vllm, cfg, work=work, number=n, context=context, rows=rows, place=place,
            adapter=adapter,
        )
        for n, place in enumerate(places)
    ]  # fmt: skip
    # one that measures a GPU's free memory must be the only one that takes of it meanwhile
    pool = ThreadPoolExecutor(len(servers) if all(p.alone for p in places) else 1)
    try:
        jobs = [pool.submit(server.start) for server in servers]
        return [(job.result(), server) for job, server in zip(jobs, servers, strict=True)]
    except BaseException:
        for server in servers:
            server.stop()
        raise
    finally:
        pool.shutdown()


def those_here(opened: list[Opened], needed: int) -> tuple[int, list[Backend]]:
    """The context that all who answer have, at least `needed`; and who does not answer yet.

    Raises ConfigError where nobody does, or one cannot be used.
    """
    contexts, away = list[int](), dict[Backend, str]()
    for backend, _ in opened:
        try:
            contexts.append(context_of(backend, needed))
        except RequestFailed as error:
            away[backend] = str(error)
    if not contexts:
        raise ConfigError(
            f"rollout.vllm.url must name running vLLM servers; {'; '.join(away.values())}. Try "
            "--set rollout.vllm.url= to start one here."
        )
    for why in away.values():
        print(f"! {why}. The run begins without it, and takes it in when it answers.",
              file=sys.stderr)  # fmt: skip
    return min(contexts), list(away)


def context_of(backend: Backend, needed: int) -> int:
    """What a vLLM can hold; says where it takes commands from anybody.

    Raises ConfigError where it holds too little or is open and elsewhere, RequestFailed where
    nobody is there.
    """
    has = backend.context()
    if isinstance(backend, HttpBackend):
        check_guarded(backend)
    if has < needed:
        raise ConfigError(
            f"{backend.name} must take data.max_prompt_tokens + rollout.max_new_tokens + 1 "
            f"({needed}) tokens, its --max-model-len is {has}. Start it with --max-model-len "
            f"{needed}, or make both smaller, --set data.max_prompt_tokens={max(1, has // 2)} "
            f"--set rollout.max_new_tokens={max(1, has - has // 2 - 1)}."
        )
    return has
