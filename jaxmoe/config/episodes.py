# SPDX-License-Identifier: Apache-2.0
"""Checks of the settings of episodes with an environment. Next: jaxmoe/environments/episodes.py."""

from typing import TYPE_CHECKING

from jaxmoe.config.errors import require

if TYPE_CHECKING:
    from jaxmoe.config import Config

CONTEXT_KEYS = "data.max_prompt_tokens + rollout.max_new_tokens"


def context_name(cfg: "Config") -> str:
    """The settings that limit the tokens of a row, for messages."""
    return (
        "rollout.max_episode_tokens" if cfg.rollout.max_episode_tokens else read_context_name(cfg)
    )


def read_context_name(cfg: "Config") -> str:
    """The settings that limit the tokens that the policy reads at once, for messages."""
    return "rollout.max_context" if cfg.rollout.max_context else CONTEXT_KEYS


def check_episodes(cfg: "Config") -> None:
    """Raise ConfigError for limits of episodes that cannot hold together."""
    r, data = cfg.rollout, cfg.data
    if not cfg.has_environment:
        defaults = dict.fromkeys(
            ("max_turn_tokens", "max_reply_tokens", "max_context", "max_episode_tokens"), 0
        ) | {"max_turns": 1}
        changed = [name for name, value in defaults.items() if getattr(r, name) != value]
        settings = ", ".join(f"rollout.{name} ({getattr(r, name)})" for name in changed)
        resets = " ".join(f"--set rollout.{name}={defaults[name]}" for name in changed)
        require(
            not changed,
            f"{settings}: limits of episodes need an environment that replies to the policy. Try "
            f"--set data.tools=python, or --set data.environment=module:name, or {resets}.",
        )
        return
    needed = data.max_prompt_tokens + r.max_new_tokens
    first = data.max_prompt_tokens + r.max_turn_tokens + r.max_reply_tokens
    larger = f"--set rollout.max_context={2 * max(needed, first)}"
    is_large = r.max_context >= needed and r.max_context > first
    require(
        not (r.max_turns == 1 and data.tools.strip()),
        f"data.tools={data.tools} needs rollout.max_turns of 2 or more, got 1: the policy could "
        "never read what a tool returns. Try --set rollout.max_turns=6"
        f"{'' if is_large else ' ' + larger}.",
    )
    require(
        r.max_turns == 1 or r.max_context > 0,
        f"rollout.max_turns ({r.max_turns}) needs rollout.max_context, the limit of an episode's "
        "tokens: the environment's replies come in addition to "
        f"{CONTEXT_KEYS} ({needed}). Try {larger}.",
    )
    require(
        not r.max_context or r.max_context >= needed,
        f"rollout.max_context ({r.max_context}) must be at least {CONTEXT_KEYS} ({needed}): the "
        f"turns do not fit. Try {larger}.",
    )
    total, context = r.max_episode_tokens, r.max_context or max(needed, first + 1)
    harmony = "" if data.template == "harmony" else " --set data.template=harmony"
    require(
        not total or (0 < r.max_context < total),
        f"rollout.max_episode_tokens ({total}) limits all contexts of an episode together, so it "
        f"must exceed rollout.max_context ({r.max_context}), the limit of one, which must be set. "
        f"Try --set rollout.max_context={context} --set rollout.max_episode_tokens={4 * context}"
        f"{harmony}.",
    )
    require(
        not (total and harmony),
        "rollout.max_episode_tokens needs data.template=harmony, in which an environment's "
        f"messages become a new context, got {data.template!r:.60}. Try{harmony}.",
    )
    require(
        r.max_turn_tokens <= r.max_new_tokens,
        f"rollout.max_turn_tokens ({r.max_turn_tokens}) must be at most rollout.max_new_tokens "
        f"({r.max_new_tokens}), which all turns share. Try --set rollout.max_turn_tokens=0.",
    )
    require(
        r.max_turns == 1 or first < r.max_context,
        f"rollout.max_context ({r.max_context}) must exceed data.max_prompt_tokens + "
        f"rollout.max_turn_tokens + rollout.max_reply_tokens ({first}): no second turn fits. Try "
        # A context that the model does not have is no advice; 0 cuts replies where it ends.
        f"{larger if first < cfg.model.max_context else '--set rollout.max_reply_tokens=0'}.",
    )
