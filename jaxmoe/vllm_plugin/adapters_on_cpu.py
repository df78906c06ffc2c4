# SPDX-License-Identifier: Apache-2.0
"""Adapters of attention in a GPT-OSS that vLLM runs on a CPU.

vLLM 0.32 gives every GPT-OSS that serves adapters the experts of Triton, even where these are of
attention alone, and a CPU cannot run those. Here its experts are the ones without adapters.
"""

import logging
from typing import Any

_DONE = "jaxmoe_plain_experts"  # attribute of the class that was taught already


def install() -> None:
    """On a CPU; on another device or vLLM leave everything as it is."""
    try:
        from vllm.model_executor.layers.fused_moe.config import (  # pyright: ignore[reportMissingImports]
            FusedMoEConfig,
        )
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if current_platform.is_cpu() and not getattr(FusedMoEConfig, _DONE, False):
            _teach(FusedMoEConfig)
            setattr(FusedMoEConfig, _DONE, True)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning("vLLM on a CPU may serve no adapters: %s", error)


def _teach(config_class: Any) -> None:
    stock = config_class.__post_init__

    def plain(self: Any) -> None:
        self.is_lora_enabled = False
        stock(self)

    config_class.__post_init__ = plain
