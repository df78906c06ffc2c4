# SPDX-License-Identifier: Apache-2.0
"""Check that LoRA fits the rest of a config. Next: jaxmoe/model/lora.py."""

from typing import TYPE_CHECKING

from jaxmoe.config.errors import Needs, require
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
            name not in cfg.lora.modules_to_save.split(",")
            or any(getattr(kind, name) for kind in cfg.model.plan.kinds),
            f"lora.modules_to_save={cfg.lora.modules_to_save} needs layers with {name}, got "
            f"model.layer_types={cfg.model.layer_types}. Try --set lora.modules_to_save=.",
        )
    check_group_sizes(cfg, needs)
