# SPDX-License-Identifier: Apache-2.0
"""Digests of the parameters a running model computes with, wherever vLLM has put them.

On a CPU vLLM packs the weight of a linear layer into oneDNN and keeps no tensor of it; it is read
back by multiplying it with the identity, exactly but for numbers below the smallest normal one.
Cost: one pass over the parameters on their own device, and in·in·out multiply-adds for each
packed matrix; one of more than READ_BACK of them is called unreadable instead.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from jaxmoe.vllm_plugin.names import LAYER
from jaxmoe.weight_sync.checksum import digest

Form = Callable[[torch.Tensor], torch.Tensor]

READ_BACK = 2 * 10**10  # multiply-adds, well under a second on one core
_ROWS = 256  # of the identity at once
_WORDS = 1 << 22  # words summed at once on a device


def digest_tensor(tensor: torch.Tensor) -> str:
    """`checksum.digest` of a tensor's bytes, computed where the tensor is."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.device.type == "cpu":
        return digest(raw.numpy())
    return _digest_on_device(raw)


def _digest_on_device(raw: torch.Tensor) -> str:
    """Two's complement wraps as arithmetic modulo 2^64 does."""
    spare = -raw.numel() % 8
    if spare:
        raw = torch.nn.functional.pad(raw, (0, spare))
    words = raw.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        odd = 2 * torch.arange(start, start + part.numel(), device=raw.device) + 1
        sums += torch.stack([part.sum(), (part * odd).sum()])
    plain, weighted = (int(x) % 2**64 for x in sums.tolist())
    return f"{plain:016x}{weighted:016x}"


def digests(model: torch.nn.Module) -> tuple[dict[str, str], list[str]]:
    """(digest of each parameter by vLLM's name, parameters that cannot be read).

    A fused query, key and value counts as three: "….qkv_proj.weight[q]", "[k]" and "[v]". Where
    vLLM serves adapters their buffers are among them, and whose these are.
    """
    found = _adapters(model)
    unreadable: list[str] = []
    for name, module, key, parameter in _parameters(model):
        content = _content(module, key, parameter)
        if content is None:
            unreadable.append(name)
            continue
        for part, rows in _parts(module, content):
            found[name + part] = digest_tensor(rows)
    return found, unreadable


def _adapters(model: torch.nn.Module) -> dict[str, str]:
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


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, Any, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{key}", module, key, parameter


def _content(module: Any, key: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """What the model computes with for this parameter, or None where it cannot be read."""
    content = _read_back(module, parameter) if _is_packed(module, key, parameter) else parameter
    if content is None or content.numel() == 0:
        return None
    # rows that vLLM added to a vocabulary hold nothing of a checkpoint
    rows = getattr(module, "org_vocab_size", None)
    return content if getattr(module, "tp_size", 1) != 1 else content[:rows]


def _is_packed(module: Any, key: str, parameter: torch.Tensor) -> bool:
    """Whether the model computes with a packed copy; an output head keeps its weight beside it."""
    if key != "weight" or not hasattr(module, "cpu_linear"):
        return False
    return parameter.numel() == 0 or type(module).__name__ == "ParallelLMHead"


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """Without what a product may lose: the sign of 0, and numbers too small to be normal."""
    return tensor.masked_fill(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0.0)


def _read_back(module: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """[out, in] of a packed linear layer, settled: x·Wᵀ with the identity is Wᵀ, exactly."""
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    summed = next((getattr(module, name) for name in names if hasattr(module, name)), 0)
    columns = list[torch.Tensor]()
    for start in range(0, summed, _ROWS):
        rows = torch.zeros(min(_ROWS, summed - start), summed, dtype=parameter.dtype)
        rows[torch.arange(len(rows)), start + torch.arange(len(rows))] = 1
        columns.append(module.cpu_linear(rows, parameter, None))
        if summed * summed * columns[0].shape[1] > READ_BACK:
            return None
    return _settled(torch.cat(columns).t()) if columns else None


def _parts(module: Any, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if type(module).__name__ != "QKVParallelLinear":
        yield "", content
        return
    queries = module.num_heads * module.head_size
    keys = module.num_kv_heads * module.head_size
    for part, rows in zip("qkv", content.split([queries, keys, keys]), strict=True):
        yield f"[{part}]", rows


def stored_forms(model: torch.nn.Module, parallel: Any) -> dict[str, tuple[Form, bool]]:
    """What a checkpoint's tensor becomes in each parameter, by the names `digests` uses.

    And whether that is exact. Else it is the tensor in the parameter's dtype, which differs
    wherever the parameter does: experts packed for a GPU's kernel, and everything where a
    parameter is spread over several workers.
    """
    alone = parallel.world_size == parallel.data_parallel_size == 1
    forms: dict[str, tuple[Form, bool]] = {}
    for name, module, key, parameter in _parameters(model):
        cast: Form = partial(torch.Tensor.to, dtype=parameter.dtype)
        form: Form | None = cast
        if _is_packed(module, key, parameter):
            form = partial(_cast_and_settled, dtype=parameter.dtype)
        elif key in ("w13_weight", "w2_weight"):
            form = _packing(module, parameter)
        stored = (form, True) if alone and form is not None else (cast, False)
        parts = "qkv" if type(module).__name__ == "QKVParallelLinear" else ""
        for part in [f"[{p}]" for p in parts] or [""]:
            forms[name + part] = stored
    return forms


def _cast_and_settled(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _settled(tensor.to(dtype))


def _packing(module: Any, parameter: torch.Tensor) -> Form | None:
    """Experts [E, in, out] as vLLM's CPU kernel keeps them; None for every other kernel."""
    kernel = getattr(module.quant_method, "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    if type(experts).__name__ != "CPUUnquantizedExperts" or experts._use_zentorch:
        return None
    from vllm._custom_ops import (  # pyright: ignore[reportMissingImports]
        cpu_prepack_moe_weight,
    )

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        turned = tensor.to(parameter.dtype).transpose(1, 2).contiguous()
        return cpu_prepack_moe_weight(turned, experts.isa)

    return pack
