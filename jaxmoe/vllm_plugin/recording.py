# SPDX-License-Identifier: Apache-2.0
"""What the modules of a running vLLM give for one forward: copies, made by hooks and then gone.

The doctor applies the trainer's own pieces to them, and sees which kernel rounds otherwise.
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
_OF_A_LAYER = 7


class Recording:
    """Hooks on a model's modules, until `stop()`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._again = model, ""
        self._found: dict[str, tuple[np.ndarray, ...]] = {}
        names = [
            n for n, _ in model.named_modules() if n in (_EMBED, _FINAL) or _LAYER.fullmatch(n)
        ]
        layers = {m[1] for m in map(_LAYER.fullmatch, names) if m}
        if not layers or len(names) != 2 + _OF_A_LAYER * len(layers):
            raise RuntimeError(
                f"vLLM's GPT-OSS must have the modules that are recorded; of {len(layers)} layers "
                f"{len(names)} were found. This version's are not known: report it."
            )
        wanted = set(names)
        self._hooks = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in model.named_modules() if name in wanted
        ]  # fmt: skip

    def _hook(self, name: str) -> Any:
        def keep(_module: Any, args: Any, _kwargs: Any, out: Any) -> None:
            if name in self._found:
                self._again = name
            given = args if name.endswith("attn.attn") else ()  # its q, k, v are rotated by then
            made = out if isinstance(out, tuple) else (out,)
            self._found[name] = tuple(copied(x) for x in (*given, *made) if x is not None)

        return keep

    def stop(self) -> dict[str, Any]:
        """By module, copies of what it gave, float32 (of attention: q, k, v, and that).

        Beside them "cos_sin", the table that positions are looked up in.
        Raises: RuntimeError where there was not exactly one forward.
        """
        for hook in self._hooks:
            hook.remove()
        if self._again or len(self._found) != len(self._hooks):
            raise RuntimeError(
                "one forward must run while it is recorded; "
                + (f"{self._again} ran twice" if self._again else "there was none, or a part")
                + ". Is another request in flight?"
            )
        table = dict(self._model.named_buffers())["model.layers.0.attn.rotary_emb.cos_sin_cache"]
        return {**self._found, "cos_sin": (copied(table),)}


def copied(x: torch.Tensor) -> np.ndarray:
    """On the host, in float32: kernels write over what they were given."""
    return x.detach().to(device="cpu", dtype=torch.float32, copy=True).numpy()
