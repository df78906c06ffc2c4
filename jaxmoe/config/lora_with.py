# SPDX-License-Identifier: Apache-2.0
"""Check that LoRA fits the rest of a config. Next: jaxmoe/model/lora.py."""

from typing import TYPE_CHECKING

from jaxmoe.config.errors import Needs, require
from jaxmoe.config.lora import EXPERTS, MODULES_TO_SAVE, VLLM_RANKS
from jaxmoe.config.quant import check_group_sizes

if TYPE_CHECKING:
    from jaxmoe.config import Config


def check_lora(cfg: "Config") -> None:
    """Raise ConfigError for settings that do not work with LoRA."""
    if not cfg.lora.ranks:
        merged = cfg.rollout.vllm.lora == "merged"
        Needs(cfg, "rollout.vllm.lora", "--set rollout.vllm.lora=merged")(
            merged, "lora.attention_rank=16", "all weights are trained", requirement="adapters"
        )
        return
    needs = Needs(cfg, "lora", "--set lora.attention_rank=0 --set lora.expert_rank=0")
    axes = [f"mesh.{name}=1" for name, size in cfg.mesh.sizes.items() if size > 1]
    files = "adapters are trained on one device, and reach vLLM in files"
    needs(not axes, " ".join(axes), files, requirement="one device")
    reason = (
        "Muon makes the update of a weight orthogonal, and that of two factors by themselves is "
        "another"
    )
    needs(not cfg.optim.is_muon, "optim.name=adamw", reason)
    needs(cfg.optim.moments == "device", "optim.moments=device", files)
    needs(cfg.critic.backbone != "own", "critic.backbone=shared", files)
    has_base = bool(cfg.init.checkpoint and cfg.warmup.steps == 0)
    Needs(cfg, "lora.init_from")(
        not cfg.lora.init_from or has_base,
        "init.checkpoint=DIRECTORY warmup.steps=0",
        requirement="its base",
    )
    for name in ("sinks", "biases"):
        require(
            cfg.lora.fully_trained.isdisjoint(MODULES_TO_SAVE[name])
            or any(getattr(kind, name) for kind in cfg.model.plan.kinds),
            f"lora.modules_to_save={cfg.lora.modules_to_save} needs layers with {name}, got "
            f"model.layer_types={cfg.model.layer_types}. Try --set lora.modules_to_save=.",
        )
    check_group_sizes(cfg, needs)


def check_lora_of_vllm(cfg: "Config") -> None:
    """Raise ConfigError for settings of LoRA that vLLM cannot sample with."""
    if not cfg.lora.ranks:
        return
    vllm = cfg.rollout.vllm
    require(
        vllm.transport == "files",
        f"lora needs rollout.vllm.transport=files, got rollout.vllm.transport={vllm.transport}: "
        "adapters are trained on one device, and reach vLLM in files. Try --set "
        "rollout.vllm.transport=files, or --set lora.attention_rank=0 --set lora.expert_rank=0.",
    )
    if vllm.lora == "adapter":
        _check_adapter(cfg)


def _check_adapter(cfg: "Config") -> None:
    alternative = "or --set rollout.vllm.lora=merged, which sends full weights."
    require(
        bool(cfg.init.checkpoint) and cfg.warmup.steps == 0,
        "rollout.vllm.lora=adapter needs a base that vLLM can load, got "
        f"init.checkpoint={cfg.init.checkpoint!r} with warmup.steps={cfg.warmup.steps}. Try --set "
        f"init.checkpoint=DIRECTORY --set warmup.steps=0, {alternative}",
    )
    require(
        not cfg.rollout.vllm.url,
        "rollout.vllm.lora=adapter needs a vLLM that this run starts, got rollout.vllm.url="
        f"{cfg.rollout.vllm.url}. Try --set rollout.vllm.url=, {alternative}",
    )
    require(
        not cfg.lora.modules_to_save,
        f"rollout.vllm.lora=adapter sends only low-rank matrices, got lora.modules_to_save="
        f"{cfg.lora.modules_to_save}. Try --set lora.modules_to_save=, {alternative}",
    )
    require(
        cfg.rollout.vllm.complete_sync_every == 1,
        "rollout.vllm.lora=adapter sends each adapter complete, got "
        f"rollout.vllm.complete_sync_every={cfg.rollout.vllm.complete_sync_every}. Try --set "
        f"rollout.vllm.complete_sync_every=1, {alternative}",
    )
    experts = [name for name in EXPERTS if name in cfg.lora.ranks]
    require(
        len(experts) != 1,
        f"rollout.vllm.lora=adapter needs adapters for both of the experts' matrices or none, got "
        f"{''.join(experts)}: vLLM accepts only both. Try --set "
        f"lora.targets={','.join({**cfg.lora.ranks, **dict.fromkeys(EXPERTS, 0)})}, {alternative}",
    )
    require(
        cfg.lora.rank <= VLLM_RANKS[-1],
        f"rollout.vllm.lora=adapter needs ranks of at most {VLLM_RANKS[-1]}, got {cfg.lora.rank}. "
        f"Try --set lora.attention_rank=16 --set lora.expert_rank=16, {alternative}",
    )
