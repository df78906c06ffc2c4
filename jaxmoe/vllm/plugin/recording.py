# SPDX-License-Identifier: Apache-2.0
"""Record the outputs of a running vLLM's modules during one forward, as copies made by hooks.

The doctor applies the trainer's own ops to them, and finds the kernel that rounds differently.
"""

import re
from typing import Any

import numpy as np
import torch

_EMBED, _FINAL = "model.embedding", "model.norm"
_LAYER = re.compile(
    r"model\.layers\.(\d+)\."
    r"(input_layernorm|attn\.qkv_proj|attn\.attn|attn\.o_proj|post_attention_layernorm"
    r"|mlp\.router|mlp\.experts)"
)
_MODULES_PER_LAYER = 7


class Recording:
    """Forward hooks on a model's modules, until `stop()`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._repeated_module = model, ""
        self._outputs: dict[str, tuple[np.ndarray, ...]] = {}
        names = [
            n for n, _ in model.named_modules() if n in (_EMBED, _FINAL) or _LAYER.fullmatch(n)
        ]
        layers = {m[1] for m in map(_LAYER.fullmatch, names) if m}
        if not layers or len(names) != 2 + _MODULES_PER_LAYER * len(layers):
            raise RuntimeError(
                f"vLLM's GPT-OSS must have the modules that are recorded; {len(names)} were found "
                f"in {len(layers)} layers. This version's modules are unknown: please report it."
            )
        recorded_names = set(names)
        self._hooks = [
            module.register_forward_hook(self._make_hook(name), with_kwargs=True)
            for name, module in model.named_modules()
            if name in recorded_names
        ]

    def _make_hook(self, name: str) -> Any:
        def record_outputs(_module: Any, args: Any, _kwargs: Any, out: Any) -> None:
            if name in self._outputs:
                self._repeated_module = name
            inputs = args if name.endswith("attn.attn") else ()  # after RoPE
            outputs = out if isinstance(out, tuple) else (out,)
            self._outputs[name] = tuple(
                copy_to_host(x) for x in (*inputs, *outputs) if x is not None
            )

        return record_outputs

    def stop(self) -> dict[str, Any]:
        """Return, by module, float32 copies of its outputs; for attention q, k, v and the output.

        "cos_sin" is the table that positions are looked up in. Raises RuntimeError unless exactly
        one forward was recorded.
        """
        for hook in self._hooks:
            hook.remove()
        if self._repeated_module or len(self._outputs) != len(self._hooks):
            raise RuntimeError(
                "exactly one forward must run during the recording; "
                + (
                    f"{self._repeated_module} ran twice"
                    if self._repeated_module
                    else "none ran, or only a part"
                )
                + ". Is another request in flight?"
            )
        table = dict(self._model.named_buffers())["model.layers.0.attn.rotary_emb.cos_sin_cache"]
        return {**self._outputs, "cos_sin": (copy_to_host(table),)}


def copy_to_host(x: torch.Tensor) -> np.ndarray:
    """Return a float32 copy on the host; kernels overwrite their inputs."""
    return x.detach().to(device="cpu", dtype=torch.float32, copy=True).numpy()
