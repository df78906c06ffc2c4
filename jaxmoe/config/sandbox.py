# SPDX-License-Identifier: Apache-2.0
"""Config of the sandbox in which programs of the policy run. Next: jaxmoe/sandbox/probe.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.errors import require
from jaxmoe.config.settings import Section, above, between, one_of, setting

if TYPE_CHECKING:
    from jaxmoe.config import Config

SANDBOX_KINDS = ("auto", "bubblewrap", "landlock", "unsafe_local")
MIN_MEMORY_MB = 64  # a Python interpreter starts in less
MAX_MB = 1 << 24  # 16 TB
TOOL_NAME = "python_sandbox"


@dataclass(frozen=True)
class SandboxConfig(Section, key="sandbox", resume=True):
    """The sandbox of programs that the policy writes, and its limits."""

    # unsafe_local contains nothing and is never chosen by auto
    kind: str = setting("auto", "auto: bubblewrap, else landlock", one_of(*SANDBOX_KINDS))
    memory_mb: int = setting(512, "address space of a program", between(MIN_MEMORY_MB, MAX_MB))
    call_s: float = setting(5.0, "limit of a call; a longer one loses its sandbox", above(0))
    disk_mb: int = setting(64, "files of a program; with landlock 0", between(0, MAX_MB))
    warm: int = setting(4, "sandboxes that wait for an episode", between(0, 256))

    def __post_init__(self) -> None:
        super().__post_init__()
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
