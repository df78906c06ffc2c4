# SPDX-License-Identifier: Apache-2.0
"""Config of sampling and its engine. Next: jaxmoe/config/engine.py."""

import shlex
from dataclasses import dataclass

from jaxmoe.config.engine import check_engine_name
from jaxmoe.config.errors import ConfigError, require
from jaxmoe.config.settings import (
    Section,
    above,
    above_up_to,
    at_least,
    between,
    check_no_password,
    is_server_url,
    one_of,
    setting,
)


@dataclass(frozen=True)
class VllmConfig(Section, key="rollout.vllm", resume=True):
    """Config of vLLM as the engine; used if rollout.engine is "vllm"."""

    url: str = setting("", "of running servers, by commas; empty: see launch")
    launch: int = setting(1, "servers to start without a url; 0: in this process", at_least(0))
    python: str = setting("", "interpreter of vLLM's environment; empty: this one")
    dtype: str = setting("", "of the engine; empty: model.dtype", one_of("", "float32", "bfloat16"))
    args: str = setting("", "additional options of vLLM, as on its command line")
    transport: str = setting(
        "files", "of weights to servers; in this process none", one_of("files", "nccl", "ipc")
    )
    lora: str = setting(
        "merged", "into full weights, or over init.checkpoint", one_of("merged", "adapter")
    )
    weights_dir: str = setting("/dev/shm", "folder of sent weights; it holds two versions")
    complete_sync_every: int = setting(
        1, "weight syncs; those between send only what changed", at_least(1), resume=True
    )
    on_weight_sync: str = setting(
        "keep", "what happens to running requests", one_of("keep", "wait", "abort")
    )
    start_timeout_s: float = setting(600.0, "until a started server answers", above(0))
    request_timeout_s: float = setting(600.0, "of a request with all retries", above(0))
    retries: int = setting(5, "of a request, and of a server that died", at_least(0))
    # 0: 1e-4 in float32, 0.1 in bfloat16
    probe_abs_diff: float = setting(0.0, "largest mean |dlogp| after a weight sync", at_least(0))

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
                is_server_url(url),
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
        super().__post_init__()


@dataclass(frozen=True)
class NativeConfig(Section, key="rollout.native", resume=True):
    """Config of the native engine."""

    on_weight_sync: str = setting(
        "admission",
        "groups: an answer's weights are those of its admission, or the newest: its keys and "
        "values stay, or are computed again",
        one_of("admission", "keep", "recompute"),
    )


@dataclass(frozen=True)
class RolloutConfig(Section, key="rollout"):
    """Config of sampling a step's sequences."""

    sequences_per_step: int = setting(..., "answers of a step", at_least(1), example=64)
    samples_per_prompt: int = setting(..., "answers of a prompt", at_least(1), example=8)
    max_new_tokens: int = setting(..., "longest answer", at_least(1), example=256)
    temperature: float = setting(1.0, "of the samples; greedy ones are all equal", above(0))
    top_k: int = setting(0, "0: off", at_least(0))
    top_p: float = setting(1.0, "1: off", above_up_to(0, 1))
    max_gen_batches: int = setting(1, "above 1: dynamic sampling with that many", at_least(1))
    max_turns: int = setting(1, "of the policy in an episode", at_least(1), example=6)
    max_turn_tokens: int = setting(0, "of a turn; 0: what is left of max_new_tokens", at_least(0))
    max_reply_tokens: int = setting(
        0,
        "of a message of the environment, cut in the middle, not in a new context; 0: no limit",
        at_least(0),
    )
    max_context: int = setting(
        0, "of prompt, turns and replies; 0: the longest prompt and answer", at_least(0)
    )
    max_episode_tokens: int = setting(
        0,
        "of all contexts of an episode together; 0: an environment may not replace the context",
        at_least(0),
    )
    reply_timeout_s: float = setting(
        60.0, "until a missing reply ends its episode; 0: no limit", at_least(0), resume=True
    )
    patience_s: float = setting(
        0.0, "the others wait so long for a late reply; 0: they all wait", at_least(0), resume=True
    )
    reply_threads: int = setting(256, "replies computed at once", between(1, 10_000), resume=True)
    max_lost_frac: float = setting(
        0.5, "largest share of a batch that faults may take", between(0, 1), resume=True
    )
    overlong_buffer: int = setting(
        0, "answers that end in the last tokens lose up to 1 of their reward", at_least(0)
    )
    max_parallel_sequences: int = setting(256, "of an engine batch", at_least(1), resume=True)
    engine: str = setting("native", "native (the trainer's forward), vllm or module:function")
    native: NativeConfig = NativeConfig()
    vllm: VllmConfig = VllmConfig()
    compare_experts: bool = setting(False, "log router/expert_switches")
    max_staleness: int = setting(0, "steps that sampling may be ahead", at_least(0))
    schedule: str = setting(
        "batch",
        "a step's prompts at once, or each as soon as there is room",
        one_of("batch", "groups"),
    )
    max_lag: int = setting(0, "groups: steps that a prompt may be late", at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        n, r = self.sequences_per_step, self.samples_per_prompt
        require(
            n % r == 0,
            f"rollout.sequences_per_step ({n}) must be a multiple of rollout.samples_per_prompt "
            f"({r}). Try --set rollout.sequences_per_step={max(1, n // r) * r}.",
        )
        check_engine_name(self.engine)
        require(
            self.overlong_buffer <= self.max_new_tokens,
            f"rollout.overlong_buffer ({self.overlong_buffer}) must be at most "
            f"rollout.max_new_tokens ({self.max_new_tokens}). "
            "Try --set rollout.overlong_buffer=0.",
        )

        s, lag = self.max_staleness, self.max_lag
        require(
            self.schedule == "groups" or lag == 0,
            f"rollout.max_lag ({lag}) needs rollout.schedule=groups. Try --set rollout.max_lag=0.",
        )
        require(
            self.schedule == "batch" or lag < s,
            f"rollout.max_lag ({lag}) must be below rollout.max_staleness ({s}) with "
            "rollout.schedule=groups: a prompt can be late only if others were sampled ahead. Try "
            f"--set rollout.max_staleness={lag + 1}.",
        )

        sync = self.native.on_weight_sync
        require(
            not self.changes_in_flight or (self.schedule, self.engine) == ("groups", "native"),
            f"rollout.native.on_weight_sync={sync} needs rollout.schedule=groups with "
            f"rollout.engine=native, got {self.schedule} with {self.engine}: a batch has the "
            "weights with which it began. Try --set rollout.native.on_weight_sync=admission.",
        )

    @property
    def changes_in_flight(self) -> bool:
        """True if the native engine goes on with new weights in answers that have begun."""
        return self.native.on_weight_sync != "admission"

    @property
    def prompts_per_step(self) -> int:
        return self.sequences_per_step // self.samples_per_prompt

    @property
    def newest_weights_advice(self) -> str:
        """Settings to type so that the newest weights sample all tokens."""
        groups = " --set rollout.schedule=batch --set rollout.max_lag=0"
        return "Try --set rollout.max_staleness=0" + groups * (self.schedule == "groups") + "."

    @property
    def older_versions(self) -> int:
        """Number of versions that may sample although the engine has newer weights."""
        pins = self.schedule == "groups" and not self.changes_in_flight
        return self.max_staleness if pins else min(1, self.max_staleness)

    @property
    def groups_at_once(self) -> int:
        """Number of prompts whose samples are in flight at once on one server."""
        return max(1, self.max_parallel_sequences // self.samples_per_prompt)
