# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter into a running vLLM, in the place of the one before, and what is live of it.

vLLM says no more of an adapter than that it was read: a matrix that no layer takes is skipped
without a word, and a worker that dropped the adapter takes, with the next request, whatever lies at
the request's path. So the buffers that its kernels read are compared before and after, as other
weights are. Next: loaded_state.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jaxmoe.vllm_plugin import manifest
from jaxmoe.vllm_plugin.live import digest_tensor, digests
from jaxmoe.vllm_plugin.loaded_state import ExpectedParameter
from jaxmoe.vllm_plugin.names import LAYER, adapter_places
from jaxmoe.vllm_plugin.served import ADAPTER, NUMBER
from jaxmoe.vllm_plugin.transfer import check_bytes

CONFIG = "adapter_config.json"


def load(worker: Any, directory: Path) -> None:
    """Check a folder of PEFT's, with a manifest beside, and load it; nothing else is served then.

    After vLLM's finish_weight_update, which drops every adapter.
    Raises UpdateRejected, naming tensors, before anything is touched.
    """
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    manifest.check_folder(directory)
    expected = manifest.read(directory)
    manifest.check_files(expected, directory)
    received = check_bytes(expected, directory)
    where = adapter_places(list(expected.tensors), json.loads((directory / CONFIG).read_text()))
    model = worker.model_runner.get_model()
    live = adapter_digests(model)
    manifest.reject(
        expected.label,
        [f"{name} has no layer of this vLLM: it serves no adapter of it"
         for name, place in where.items() if place not in live],
    )  # fmt: skip
    state = worker.weight_transfer_engine.loaded_state
    before = digests(model)[0] | live
    state.invalidate()
    worker.add_lora(LoRARequest(ADAPTER, NUMBER, str(directory), load_inplace=True))
    after, unreadable = digests(model)
    took = {name: ExpectedParameter(received[name], False, where[name]) for name in received}
    state.record(expected.label, received, took, before, after | adapter_digests(model), unreadable)


def adapter_digests(model: Any) -> dict[str, str]:
    """Digest of each buffer of adapters that a kernel reads, as "layers.3.q.A", and whose they are
    ("slots"); {} without LoRA.
    """
    found: dict[str, str] = {}
    if (manager := getattr(model, "lora_manager", None)) is not None:
        found["slots"] = str(manager.lora_index_to_id)
    for prefix, module in model.named_modules():
        layer = LAYER.search(prefix + ".")
        if layer is None:
            continue
        for matrix, letter, tensors in _buffers(prefix.rpartition(".")[2], module):
            found[f"layers.{layer[1]}.{matrix}.{letter}"] = "".join(map(digest_tensor, tensors))
    return found


def _buffers(last: str, module: Any) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    held = vars(module)
    for letter in "ab":
        if stacked := held.get(f"lora_{letter}_stacked"):
            parts = {"qkv_proj": "qkv", "o_proj": "o"}.get(last, "")
            for part, tensor in zip(parts, stacked, strict=False):
                yield part, letter.upper(), [tensor]
        for matrix, name in (("gate_up", "w13"), ("down", "w2")):
            if stacked := held.get(f"{name}_lora_{letter}_stacked"):
                yield matrix, letter.upper(), list(stacked)
