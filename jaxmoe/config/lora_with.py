# SPDX-License-Identifier: Apache-2.0
"""Check that LoRA fits the rest of a config. Next: jaxmoe/model/lora.py."""

from typing import TYPE_CHECKING

from jaxmoe.config.errors import require
from jaxmoe.config.lora import EXPERTS, VLLM_RANKS
from jaxmoe.config.model import CHECKPOINT_MODEL

if TYPE_CHECKING:
    from jaxmoe.config import Config


def check_lora(cfg: "Config") -> None:
    """Raise ConfigError for settings that do not work with LoRA."""
    if not cfg.lora.ranks:
        require(
            cfg.rollout.vllm.lora == "merged",
            f"rollout.vllm.lora={cfg.rollout.vllm.lora} needs adapters, and LoRA is off: all "
            "weights are trained. Try --set rollout.vllm.lora=merged.",
        )
        return
    axes = {f"mesh.{name}": size for name, size in cfg.mesh.sizes.items() if size > 1}
    require(
        not axes,
        "lora needs one device, whose adapters reach vLLM in files, got "
        f"{', '.join(f'{key}={size}' for key, size in axes.items())}. "
        f"Try {' '.join(f'--set {key}=1' for key in axes)}, or --set lora.attention_rank=0 --set "
        "lora.expert_rank=0.",
    )
    require(
        not cfg.optim.is_muon,
        f"lora needs another optimizer, got optim.name={cfg.optim.name}: Muon makes the update of "
        "a weight orthogonal, and that of two factors by themselves is another. Try --set "
        "optim.name=adamw, or --set lora.attention_rank=0 --set lora.expert_rank=0.",
    )
    for key, actual, required in (
        ("optim.moments", cfg.optim.moments, "device"),
        ("critic.backbone", cfg.critic.backbone if cfg.critic.backbone == "own" else 0, 0),
    ):
        setting = "critic.backbone=shared" if key == "critic.backbone" else f"{key}={required}"
        require(
            actual == required,
            f"lora needs {setting}, got {key}={actual}: adapters are trained on one device, "
            "and reach vLLM in files. "
            f"Try --set {setting}, or --set lora.attention_rank=0 --set lora.expert_rank=0.",
        )
    require(
        not cfg.lora.init_from or bool(cfg.init.checkpoint and cfg.warmup.steps == 0),
        f"lora.init_from={cfg.lora.init_from} needs its base, got init.checkpoint="
        f"{cfg.init.checkpoint!r} with warmup.steps={cfg.warmup.steps}. Try --set "
        "init.checkpoint=DIRECTORY --set warmup.steps=0.",
    )
    for name in ("sinks", "biases"):
        require(
            name not in cfg.lora.modules_to_save.split(",")
            or any(getattr(kind, name) for kind in cfg.model.plan.kinds),
            f"lora.modules_to_save={cfg.lora.modules_to_save} needs layers with {name}, got "
            f"model.layer_types={cfg.model.layer_types}. Try --set lora.modules_to_save=.",
        )
    for name in ("d_model", "d_expert"):
        size = getattr(cfg.model, name)
        require(
            size % 64 == 0 or cfg.model == CHECKPOINT_MODEL,
            f"lora needs model.{name} to be a multiple of 64, got {size}: its base has experts "
            f"in four bits, two groups of 32 in a byte's halves. Try --set model.{name}="
            f"{-(-size // 64) * 64}.",
        )


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
