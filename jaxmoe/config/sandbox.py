# SPDX-License-Identifier: Apache-2.0
"""Config of the sandbox in which programs of the policy run. Next: jaxmoe/sandbox/probe.py."""

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.errors import NOT_NEGATIVE, check_fields, require

if TYPE_CHECKING:
    from jaxmoe.config import Config

SANDBOX_KINDS = ("auto", "bubblewrap", "landlock", "unsafe_local")
MIN_MEMORY_MB = 64  # a Python interpreter starts in less
MAX_MB = 1 << 24
MAX_WARM = 256
TOOL_NAME = "python_sandbox"


@dataclass(frozen=True)
class SandboxConfig:
    """The sandbox of programs that the policy writes, and its limits."""

    # auto: bubblewrap, else landlock; unsafe_local contains nothing and is never chosen by auto
    kind: str = "auto"
    memory_mb: int = 512  # address space of a program
    call_s: float = 5.0  # seconds of a call; a longer one loses its sandbox
    disk_mb: int = 64  # files of a program, in memory; landlock can limit them to 0 only
    warm: int = 4  # sandboxes that wait for an episode

    def __post_init__(self) -> None:
        close = difflib.get_close_matches(self.kind, SANDBOX_KINDS, 1) or ["auto"]
        require(
            self.kind in SANDBOX_KINDS,
            f"sandbox.kind must be one of {', '.join(SANDBOX_KINDS)}; got {self.kind!r}. "
            f"Try --set sandbox.kind={close[0]}.",
        )
        check_fields(
            "sandbox",
            self,
            memory_mb=(f"{MIN_MEMORY_MB} or more", lambda x: x >= MIN_MEMORY_MB, 512),
            call_s=("above 0, and finite", lambda x: 0 < x < 1e9, 5.0),
            disk_mb=(*NOT_NEGATIVE, 64),
            warm=(f"between 0 and {MAX_WARM}", lambda x: 0 <= x <= MAX_WARM, 4),
        )
        for name, value, usual in (
            ("memory_mb", self.memory_mb, 512),
            ("disk_mb", self.disk_mb, 64),
        ):
            require(
                value <= MAX_MB,
                f"sandbox.{name} must be at most {MAX_MB:,} (16 TB), got {value:,}. "
                f"Try --set sandbox.{name}={usual}.",
            )
        require(
            self.kind != "landlock" or self.disk_mb == 0,
            f"sandbox.disk_mb ({self.disk_mb}) cannot be set with sandbox.kind=landlock, which has "
            "no quota for files. Try --set sandbox.disk_mb=0, or --set sandbox.kind=bubblewrap.",
        )


def check_sandbox(cfg: "Config") -> None:
    """Raise ConfigError if a call's limit cannot be reached before the one of a reply."""
    reply_s, call_s = cfg.rollout.reply_timeout_s, cfg.sandbox.call_s
    require(
        TOOL_NAME not in cfg.data.tools or reply_s == 0 or call_s < reply_s,
        f"sandbox.call_s ({call_s:g}) must be below rollout.reply_timeout_s ({reply_s:g}), which "
        f"would end the episode first. Try --set rollout.reply_timeout_s={2 * call_s + 30:g}.",
    )
