# SPDX-License-Identifier: Apache-2.0
"""Config of a teacher. Next: jaxmoe/rl/distillation.py has its part of the loss."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.errors import Needs, require
from jaxmoe.config.settings import Section, above, at_least, between, is_server_url, setting

if TYPE_CHECKING:
    from jaxmoe.config import Config

COEFS = ("advantage_coef", "reverse_kl_coef", "forward_kl_coef")
URLS = ("http://", "https://")


@dataclass(frozen=True)
class DistillConfig(Section, key="distill"):
    """A teacher: another model that judges the tokens of the policy's own answers."""

    teacher: str = setting(
        "",
        "base: the weights before RL; a folder of weights; a run's folder, or FOLDER@STEP; the "
        "URL of a vLLM; empty: none",
        example="base",
    )
    advantage_coef: float = setting(
        0.0, "weight of log(teacher / policy) in a token's advantage", at_least(0), example=1.0
    )
    reverse_kl_coef: float = setting(
        0.0, "weight of kl(policy, teacher) over the vocabulary, in the loss", at_least(0)
    )
    forward_kl_coef: float = setting(
        0.0, "weight of kl(teacher, policy) over the vocabulary, in the loss", at_least(0)
    )
    top_k: int = setting(
        0,
        "words of the vocabulary, the teacher's likeliest at each token, that a vLLM returns; 0: "
        "the sampled token alone",
        at_least(0),
    )
    reward_coef: float = setting(
        1.0, "weight of the rewards' advantages; 0: the teacher alone", at_least(0)
    )
    warmup_share: float = setting(
        0.0,
        "share of kl(teacher, policy) on the stored answers in the warm start's loss; the rest is "
        "cross entropy",
        between(0, 1),
    )
    anneal_steps: int = setting(
        0, "steps in which the teacher's weights fall to 0; 0: never", at_least(0)
    )
    timeout_s: float = setting(600.0, "of a request to a vLLM", above(0), resume=True)

    @property
    def is_url(self) -> bool:
        """True if the teacher is a server."""
        return self.teacher.startswith(URLS)

    @property
    def has_folder(self) -> bool:
        """True if the teacher is a second model whose weights this run loads."""
        return bool(self.teacher) and self.teacher != "base" and not self.is_url

    @property
    def compares_vocabulary(self) -> bool:
        """True if the loss has a divergence over the vocabulary."""
        return self.reverse_kl_coef > 0 or self.forward_kl_coef > 0


def check_distill(cfg: "Config") -> None:
    """Raise ConfigError for settings that do not work with a teacher, or without one."""
    d = cfg.distill
    if not d.teacher:
        for name in (*COEFS, "top_k", "warmup_share", "anneal_steps"):
            require(
                not getattr(d, name),
                f"distill.{name} ({getattr(d, name)}) needs a teacher, and there is none. Try "
                f"--set distill.teacher=base, or --set distill.{name}=0.",
            )
        require(
            d.reward_coef == 1.0,
            f"distill.reward_coef ({d.reward_coef}) needs a teacher, and there is none. Try "
            "--set distill.teacher=base, or --set distill.reward_coef=1.0.",
        )
        return
    server = Needs(cfg, "distill.teacher")
    require(
        not d.is_url or is_server_url(d.teacher),
        f"distill.teacher must name a server as http://HOST:PORT, got {d.teacher!r:.60}. Try --set "
        "distill.teacher=http://127.0.0.1:8000.",
    )
    server(
        not (d.is_url and d.compares_vocabulary) or d.top_k > 0,
        "distill.top_k=20",
        "a server returns log-probs of the likeliest words, and not of the vocabulary",
    )
    require(
        d.top_k == 0 or d.is_url,
        f"distill.top_k ({d.top_k}) is for a server; distill.teacher={d.teacher} is compared over "
        "the whole vocabulary. Try --set distill.top_k=0.",
    )
    require(
        d.top_k < cfg.model.vocab_size,
        f"distill.top_k ({d.top_k}) must be below model.vocab_size ({cfg.model.vocab_size}): the "
        "words that are not listed are one more outcome. Try --set distill.top_k=20.",
    )
    server(
        not d.is_url or cfg.rollout.temperature == 1.0,
        "rollout.temperature=1.0",
        "a server's log-probs are those at temperature 1",
    )
    require(
        d.warmup_share == 0 or (d.has_folder and cfg.warmup.steps > 0),
        f"distill.warmup_share ({d.warmup_share}) needs a warm start and the weights of another "
        f"model, got warmup.steps={cfg.warmup.steps} and distill.teacher={d.teacher}. Try --set "
        "distill.teacher=DIRECTORY, or --set distill.warmup_share=0.",
    )
    rewards = Needs(cfg, "distill.reward_coef", "--set distill.reward_coef=1.0")
    unused = "no reward is trained on, and this is a part of it"
    in_reward = cfg.loss.kl_in == "reward" and cfg.loss.kl_coef > 0
    rewards(d.reward_coef > 0 or not in_reward, "loss.kl_in=loss", unused)
    rewards(
        d.reward_coef > 0 or not cfg.rollout.overlong_buffer, "rollout.overlong_buffer=0", unused
    )
    # Groups of equal rewards, which dynamic sampling draws again, have a teacher's signal.
    rewards(
        d.reward_coef > 0 or cfg.rollout.max_gen_batches == 1,
        "rollout.max_gen_batches=1",
        "no reward is trained on, and dynamic sampling draws groups of equal rewards again",
    )
