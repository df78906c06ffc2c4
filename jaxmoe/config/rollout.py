# SPDX-License-Identifier: Apache-2.0
"""How answers are sampled, and by which engine. Next: jaxmoe/engines.py opens it."""

import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxmoe.config.errors import ConfigError, require


@dataclass(frozen=True)
class VllmConfig:
    """Where vLLM runs and how weights get there; read where rollout.engine is "vllm"."""

    url: str = ""  # of running servers, a comma between them; empty: start or be one
    launch: int = 1  # servers to start where no url is given; 0: in this process
    python: str = ""  # interpreter of the environment that vLLM is in; empty: this one
    dtype: str = ""  # of the engine's arithmetic; empty: model.dtype
    args: str = ""  # more of vLLM's own options, as on its command line
    transport: str = "files"  # of new weights: files, nccl or ipc; in this process they are shared
    lora: str = "merged"  # a run's adapters reach vLLM merged, as whole weights; or as an adapter
    # over the base, init.checkpoint, that vLLM loads by itself
    weights_dir: str = "/dev/shm"  # where files of weights pass; two versions lie there at once
    on_weight_sync: str = "keep"  # requests in flight then: keep, wait (finish them) or abort
    start_timeout_s: float = 600.0  # until a server that was started answers
    request_timeout_s: float = 600.0  # in all, of one request: a prompt's samples, a sync's step
    retries: int = 5  # of a request, and of a server that died, before the run gives up
    probe_abs_diff: float = 0.0  # largest mean |dlogp| on a probe after each weight sync, nats;
    # 0: 1e-4 in float32, 0.1 in bfloat16

    @property
    def urls(self) -> list[str]:
        """Of each running server."""
        return [url.strip() for url in self.url.split(",") if url.strip()]

    def __post_init__(self) -> None:
        for url in self.urls:
            require(
                "@" not in url.partition("://")[2].partition("/")[0],  # messages show the url
                "rollout.vllm.url must not hold a user's name or password; "
                f"http://…@{url.rpartition('@')[2]} was given. Leave them out, and export "
                "VLLM_API_KEY=… for the server and for this command.",
            )
            require(
                _is_url(url),
                f"rollout.vllm.url must name servers as http://HOST:PORT, got {url!r}. "
                "Try --set rollout.vllm.url=http://127.0.0.1:8000.",
            )
        try:
            words = shlex.split(self.args)
        except ValueError as error:
            raise ConfigError(
                f"rollout.vllm.args must be options as on a command line, got {self.args!r} "
                f"({error}). Try --set rollout.vllm.args=''."
            ) from error
        require(
            not any(word.replace("_", "-").startswith("--api-k") for word in words),
            "rollout.vllm.args must not name --api-key: every user of the machine sees a command "
            "line, and each server that is started has a random key. Leave it out; where you start "
            "the server, export VLLM_API_KEY for it and for this command.",
        )
        for name, allowed in (
            ("transport", ("files", "nccl", "ipc")),
            ("on_weight_sync", ("keep", "wait", "abort")),
            ("lora", ("merged", "adapter")),
            ("dtype", ("", "float32", "bfloat16")),
        ):
            value = getattr(self, name)
            require(
                value in allowed,
                f"rollout.vllm.{name} must be one of {', '.join(a or 'empty' for a in allowed)}; "
                f"got {value!r}. Try --set rollout.vllm.{name}={allowed[0] or repr('')}.",
            )
        require(
            self.launch >= 0 and self.retries >= 0,
            f"rollout.vllm.launch ({self.launch}) and rollout.vllm.retries ({self.retries}) must "
            "be 0 or more. Try --set rollout.vllm.launch=1 --set rollout.vllm.retries=5.",
        )
        for name in ("start_timeout_s", "request_timeout_s"):
            require(
                getattr(self, name) > 0,
                f"rollout.vllm.{name} must be above 0, got {getattr(self, name)}. "
                f"Try --set rollout.vllm.{name}=600.",
            )
        require(
            self.probe_abs_diff >= 0,
            f"rollout.vllm.probe_abs_diff must be 0 or more, got {self.probe_abs_diff}. "
            "Try --set rollout.vllm.probe_abs_diff=0.",
        )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        return False


@dataclass(frozen=True)
class RolloutConfig:
    """How a step's sequences are sampled."""

    sequences_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    max_gen_batches: int = 1  # above 1: dynamic sampling, of so many batches at most
    overlong_buffer: int = 0  # answers in the last so many tokens lose up to 1 of their reward
    max_parallel_sequences: int = 256  # one engine batch; more prompts wait for the next
    engine: str = "native"  # the trainer's own forward, or "vllm"
    vllm: VllmConfig = VllmConfig()
    router_replay: bool = False  # R3: train on the experts that the engine chose for each token
    compare_experts: bool = False  # with the trainer's: the metric router/expert_switches
    max_staleness: int = 0  # sample so many steps ahead of the weights; 0: wait for each other

    def __post_init__(self) -> None:
        n, r = self.sequences_per_step, self.samples_per_prompt
        require(
            not (self.compare_experts and self.router_replay),
            "rollout.compare_experts compares the trainer's experts with the engine's; with "
            "rollout.router_replay=True they are the engine's. Try --set "
            "rollout.compare_experts=False.",
        )
        require(
            r > 0,
            f"rollout.samples_per_prompt must be positive, got {r}. "
            "Try --set rollout.samples_per_prompt=8.",
        )
        require(
            n > 0 and n % r == 0,
            f"rollout.sequences_per_step ({n}) must be a multiple of rollout.samples_per_prompt "
            f"({r}). Try --set rollout.sequences_per_step={max(1, n // r) * r}.",
        )
        require(
            self.max_parallel_sequences > 0,
            f"rollout.max_parallel_sequences must be positive, got {self.max_parallel_sequences}. "
            "Try --set rollout.max_parallel_sequences=256.",
        )
        require(
            self.max_gen_batches > 0,
            f"rollout.max_gen_batches must be positive, got {self.max_gen_batches}. "
            "Try --set rollout.max_gen_batches=1.",
        )
        require(
            self.max_new_tokens > 0,
            f"rollout.max_new_tokens must be positive, got {self.max_new_tokens}. "
            "Try --set rollout.max_new_tokens=256.",
        )
        require(
            self.temperature > 0,
            f"rollout.temperature must be above 0 (greedy samples are all alike), got "
            f"{self.temperature}. Try --set rollout.temperature=1.0.",
        )
        require(
            self.engine in ("native", "vllm"),
            f"rollout.engine must be native or vllm, got {self.engine!r}. "
            "Try --set rollout.engine=native.",
        )
        cut = self.top_k > 0 or self.top_p < 1
        require(
            not (self.engine == "vllm" and cut and self.temperature != 1.0),
            f"rollout.temperature must be 1 where rollout.engine is vllm and top_k ({self.top_k}) "
            f"or top_p ({self.top_p}) cut, got {self.temperature}: vLLM does not tell what a cut "
            "left over at another temperature. Try --set rollout.temperature=1.0, or "
            "--set rollout.top_k=0 --set rollout.top_p=1.0.",
        )
        require(
            not (self.engine == "vllm" and cut and self.max_staleness > 0),
            f"rollout.max_staleness must be 0 where rollout.engine is vllm and top_k or top_p cut, "
            f"got {self.max_staleness}: what a cut left over is asked of the weights that drew the "
            "answer, which are gone by then. Try --set rollout.max_staleness=0.",
        )
        require(
            self.max_staleness >= 0,
            f"rollout.max_staleness must be 0 or more, got {self.max_staleness}. "
            "Try --set rollout.max_staleness=0.",
        )
        require(
            0 < self.top_p <= 1,
            f"rollout.top_p must be in (0, 1], got {self.top_p}. Try --set rollout.top_p=1.0.",
        )
        require(
            self.top_k >= 0,
            f"rollout.top_k must be 0 (off) or more, got {self.top_k}. Try --set rollout.top_k=0.",
        )
        require(
            0 <= self.overlong_buffer <= self.max_new_tokens,
            f"rollout.overlong_buffer must be in [0, rollout.max_new_tokens="
            f"{self.max_new_tokens}], got {self.overlong_buffer}. "
            "Try --set rollout.overlong_buffer=0.",
        )

    @property
    def prompts_per_step(self) -> int:
        return self.sequences_per_step // self.samples_per_prompt
