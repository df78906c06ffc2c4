# SPDX-License-Identifier: Apache-2.0
"""Attention adapters for a GPT-OSS that vLLM runs on a CPU.

vLLM 0.32 gives every GPT-OSS that serves adapters the Triton experts, even if only attention has
adapters, and a CPU cannot run those. This patch selects the experts without adapters instead.
"""

import logging
from typing import Any

_PATCHED = "jaxmoe_plain_experts"  # attribute of a class that is already patched


def patch_adapters_on_cpu() -> None:
    """Patch vLLM on a CPU; on another device, or with another vLLM, change nothing."""
    try:
        from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if current_platform.is_cpu() and not getattr(FusedMoEConfig, _PATCHED, False):
            _patch_config(FusedMoEConfig)
            setattr(FusedMoEConfig, _PATCHED, True)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning("vLLM on a CPU may fail to serve adapters: %s", error)


def _patch_config(config_class: Any) -> None:
    stock = config_class.__post_init__

    def plain(self: Any) -> None:
        self.is_lora_enabled = False
        stock(self)

    config_class.__post_init__ = plain
