# SPDX-License-Identifier: Apache-2.0
"""What adapters cannot be trained, or sampled from, with. Next: jaxmoe/model/lora.py."""

from typing import TYPE_CHECKING

from jaxmoe.config.errors import require
from jaxmoe.config.lora import EXPERTS, VLLM_RANKS
from jaxmoe.config.model import CHECKPOINT_MODEL

if TYPE_CHECKING:
    from jaxmoe.config import Config


def check_lora(cfg: "Config") -> None:
    """Raises ConfigError for settings that adapters do not go with."""
    if not cfg.lora.ranks:
        require(
            cfg.rollout.vllm.lora == "merged",
            f"rollout.vllm.lora={cfg.rollout.vllm.lora} needs adapters, and lora is off: all "
            "weights are trained. Try --set rollout.vllm.lora=merged.",
        )
        return
    sent_by = cfg.rollout.vllm.transport if cfg.rollout.engine == "vllm" else "files"
    axes = {f"mesh.{name}": size for name, size in cfg.mesh.sizes.items() if size > 1}
    require(
        not axes,
        "lora needs one device, whose adapters reach vLLM in files, got "
        f"{', '.join(f'{key}={size}' for key, size in axes.items())}. "
        f"Try {' '.join(f'--set {key}=1' for key in axes)}, or --set lora.attention_rank=0 --set "
        "lora.expert_rank=0.",
    )
    for key, given, must in (
        ("rollout.vllm.transport", sent_by, "files"),
        ("optim.moments", cfg.optim.moments, "device"),
        ("critic.backbone", cfg.critic.backbone if cfg.critic.backbone == "own" else 0, 0),
    ):
        typed = "critic.backbone=shared" if key == "critic.backbone" else f"{key}={must}"
        require(
            given == must,
            f"lora needs {typed}, got {key}={given}: adapters are trained on one device, "
            "and reach vLLM in files. "
            f"Try --set {typed}, or --set lora.attention_rank=0 --set lora.expert_rank=0.",
        )
    for name in ("d_model", "d_expert"):
        size = getattr(cfg.model, name)
        require(
            size % 64 == 0 or cfg.model == CHECKPOINT_MODEL,
            f"lora needs model.{name} to be a multiple of 64, got {size}: its base has experts "
            f"in four bits, two groups of 32 in a byte's halves. Try --set model.{name}="
            f"{-(-size // 64) * 64}.",
        )
    if cfg.rollout.engine == "vllm" and cfg.rollout.vllm.lora == "adapter":
        _check_adapter_in_vllm(cfg)


def _check_adapter_in_vllm(cfg: "Config") -> None:
    otherwise = "or --set rollout.vllm.lora=merged, which sends whole weights."
    require(
        bool(cfg.init.checkpoint) and cfg.warmup.steps == 0,
        "rollout.vllm.lora=adapter needs a base that vLLM can load by itself, got "
        f"init.checkpoint={cfg.init.checkpoint!r} with warmup.steps={cfg.warmup.steps}. Try --set "
        f"init.checkpoint=DIRECTORY --set warmup.steps=0, {otherwise}",
    )
    require(
        not cfg.rollout.vllm.url,
        "rollout.vllm.lora=adapter needs a vLLM that this run starts, got rollout.vllm.url="
        f"{cfg.rollout.vllm.url}. Try --set rollout.vllm.url=, {otherwise}",
    )
    require(
        not cfg.lora.modules_to_save,
        f"rollout.vllm.lora=adapter sends low-rank matrices alone, got lora.modules_to_save="
        f"{cfg.lora.modules_to_save}. Try --set lora.modules_to_save=, {otherwise}",
    )
    experts = [name for name in EXPERTS if name in cfg.lora.ranks]
    require(
        len(experts) != 1,
        f"rollout.vllm.lora=adapter needs both of the experts' matrices adapted or none, got "
        f"{''.join(experts)}: vLLM takes an adapter of both. Try --set "
        f"lora.targets={','.join({**cfg.lora.ranks, **dict.fromkeys(EXPERTS, 0)})}, {otherwise}",
    )
    require(
        cfg.lora.rank <= VLLM_RANKS[-1],
        f"rollout.vllm.lora=adapter needs ranks of at most {VLLM_RANKS[-1]}, got {cfg.lora.rank}. "
        f"Try --set lora.attention_rank=16 --set lora.expert_rank=16, {otherwise}",
    )
