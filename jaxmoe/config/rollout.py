# SPDX-License-Identifier: Apache-2.0
"""Config of sampling and its engine. Next: jaxmoe/config/engine.py."""

import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxmoe.config.engine import check_engine_name
from jaxmoe.config.errors import ConfigError, require
from jaxmoe.config.values import check_no_password


@dataclass(frozen=True)
class VllmConfig:
    """Config of vLLM as the engine; used if rollout.engine is "vllm"."""

    url: str = ""  # of running servers, separated by commas; empty: see launch
    launch: int = 1  # number of servers to start without a url; 0: vLLM in this process
    python: str = ""  # interpreter of vLLM's environment; empty: this one
    dtype: str = ""  # of the engine's arithmetic; empty: model.dtype
    args: str = ""  # additional options of vLLM, as on its command line
    # how new weights are sent: files, nccl or ipc; with vLLM in this process they are shared
    transport: str = "files"
    # adapters of a LoRA run are sent merged into full weights; or as an "adapter" over the base,
    # init.checkpoint, which vLLM loads
    lora: str = "merged"
    weights_dir: str = "/dev/shm"  # folder for files of weights; it holds two versions at a time
    # running requests during a weight sync: keep them, wait until they finish, or abort them
    on_weight_sync: str = "keep"
    start_timeout_s: float = 600.0  # until a started server answers
    request_timeout_s: float = 600.0  # of one request with all retries
    retries: int = 5  # of a request, and of a server that died, before the run stops
    # largest mean |dlogp| on a probe after each weight sync, in nats; 0: 1e-4 in float32, 0.1 in
    # bfloat16
    probe_abs_diff: float = 0.0

    @property
    def urls(self) -> list[str]:
        """URLs of the running servers."""
        return [url.strip() for url in self.url.split(",") if url.strip()]

    def __post_init__(self) -> None:
        for url in self.urls:
            check_no_password(
                url if "://" in url else f"http://{url}",
                "rollout.vllm.url",
                "Type export VLLM_API_KEY=… for the server and for this command.",
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
            "rollout.vllm.args must not name --api-key: every user of the machine can see a "
            "command line, and each started server has a random key. Leave it out; if you start "
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
    except ValueError:  # the port is not a number, or too large
        return False


@dataclass(frozen=True)
class RolloutConfig:
    """Config of sampling a step's sequences."""

    sequences_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    max_gen_batches: int = 1  # above 1: dynamic sampling with at most this many batches
    max_turns: int = 1  # of the policy in an episode; above 1 data.environment or data.tools reply
    max_turn_tokens: int = 0  # of one turn; 0: what is left of max_new_tokens, of all turns
    max_reply_tokens: int = 0  # of one message of the environment, cut in the middle; 0: no limit
    max_context: int = 0  # of prompt, turns and replies; 0: data.max_prompt_tokens + max_new_tokens
    reply_timeout_s: float = 60.0  # until a reply that is missing ends its episode; 0: no limit
    patience_s: float = 0.0  # the other episodes wait this long for a late reply; 0: they all wait
    reply_threads: int = 256  # replies that are computed at once
    # a run stops if more of a batch than this share has no reward by a fault: of the environment,
    # a sandbox, or a reward function
    max_lost_frac: float = 0.5
    overlong_buffer: int = 0  # answers that end in the last tokens lose up to 1 of their reward
    max_parallel_sequences: int = 256  # size of an engine batch; more prompts wait for the next
    engine: str = "native"  # the trainer's forward; or "vllm", or "module:function" of your own
    vllm: VllmConfig = VllmConfig()
    compare_experts: bool = False  # log router/expert_switches: experts of trainer and engine
    max_staleness: int = 0  # number of steps that sampling may be ahead; 0: sample in sync

    def __post_init__(self) -> None:
        n, r = self.sequences_per_step, self.samples_per_prompt
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
            0 <= self.max_lost_frac <= 1,
            f"rollout.max_lost_frac must be from 0 to 1, got {self.max_lost_frac}. "
            "Try --set rollout.max_lost_frac=0.5.",
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
            f"rollout.temperature must be above 0 (greedy samples are all equal), got "
            f"{self.temperature}. Try --set rollout.temperature=1.0.",
        )
        check_engine_name(self.engine)
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
