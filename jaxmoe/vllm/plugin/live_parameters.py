# SPDX-License-Identifier: Apache-2.0
"""Digests of the parameters that a running model computes with, wherever vLLM stores them.

On a CPU vLLM packs the weight of a linear layer into oneDNN and keeps no tensor of it. The weight
is then read back by multiplying it with the identity, which is exact except for subnormal numbers.
Cost: one pass over the parameters on their own device, and in·in·out multiply-adds for each packed
matrix; a matrix that needs more than MAX_UNPACK_MACS is reported as unreadable.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from jaxmoe.vllm.plugin.names import LAYER
from jaxmoe.weight_sync.checksum import digest_array

Form = Callable[[torch.Tensor], torch.Tensor]

MAX_UNPACK_MACS = 2 * 10**10  # multiply-adds; well under a second on one core
_IDENTITY_ROWS = 256  # of the identity in one product
_WORDS_PER_CHUNK = 1 << 22  # words summed at once on a device


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return `checksum.digest_array` of a tensor's bytes, computed on the tensor's device."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.device.type == "cpu":
        return digest_array(raw.numpy())
    return _digest_on_device(raw)


def _digest_on_device(raw: torch.Tensor) -> str:
    """Digest on the device: int64 overflow wraps, as arithmetic modulo 2^64 does."""
    padding = -raw.numel() % 8
    if padding:
        raw = torch.nn.functional.pad(raw, (0, padding))
    words = raw.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _WORDS_PER_CHUNK):
        part = words[start : start + _WORDS_PER_CHUNK]
        odd_numbers = 2 * torch.arange(start, start + part.numel(), device=raw.device) + 1
        sums += torch.stack([part.sum(), (part * odd_numbers).sum()])
    plain, weighted = (int(x) % 2**64 for x in sums.tolist())
    return f"{plain:016x}{weighted:016x}"


def digest_parameters(model: torch.nn.Module) -> tuple[dict[str, str], list[str]]:
    """Return (digest of each parameter by vLLM's name, parameters that cannot be read).

    A fused query, key and value counts as three: "….qkv_proj.weight[q]", "[k]" and "[v]". If vLLM
    serves adapters, the digests include their buffers and the adapter in each slot.
    """
    digests = _digest_adapters(model)
    unreadable: list[str] = []
    for name, module, key, parameter in _iterate_parameters(model):
        content = _read_parameter(module, key, parameter)
        if content is None:
            unreadable.append(name)
            continue
        for part, rows in _split_fused(module, content):
            digests[name + part] = digest_tensor(rows)
    return digests, unreadable


def _digest_adapters(model: torch.nn.Module) -> dict[str, str]:
    """Return digests of adapter buffers, as "layers.3.q.A", and their "slots"; {} without LoRA."""
    digests: dict[str, str] = {}
    if (manager := getattr(model, "lora_manager", None)) is not None:
        digests["slots"] = str(manager.lora_index_to_id)
    for prefix, module in model.named_modules():
        layer = LAYER.search(prefix + ".")
        if layer is None:
            continue
        for matrix, letter, tensors in _adapter_buffers(prefix.rpartition(".")[2], module):
            digests[f"layers.{layer[1]}.{matrix}.{letter}"] = "".join(map(digest_tensor, tensors))
    return digests


def _adapter_buffers(last: str, module: Any) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    attributes = vars(module)
    for letter in "ab":
        if stacked := attributes.get(f"lora_{letter}_stacked"):
            parts = {"qkv_proj": "qkv", "o_proj": "o"}.get(last, "")
            for part, tensor in zip(parts, stacked, strict=False):
                yield part, letter.upper(), [tensor]
        for matrix, name in (("gate_up", "w13"), ("down", "w2")):
            if stacked := attributes.get(f"{name}_lora_{letter}_stacked"):
                yield matrix, letter.upper(), list(stacked)


def _iterate_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Any, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{key}", module, key, parameter


def _read_parameter(module: Any, key: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the values that the model computes with for this parameter; None if unreadable."""
    content = _unpack_linear(module, parameter) if _is_packed(module, key, parameter) else parameter
    if content is None or content.numel() == 0:
        return None
    # vLLM pads the vocabulary with rows that are in no checkpoint.
    rows = getattr(module, "org_vocab_size", None)
    return content if getattr(module, "tp_size", 1) != 1 else content[:rows]


def _is_packed(module: Any, key: str, parameter: torch.Tensor) -> bool:
    """Return True if the model computes with a packed copy; an output head keeps both."""
    if key != "weight" or not hasattr(module, "cpu_linear"):
        return False
    return parameter.numel() == 0 or type(module).__name__ == "ParallelLMHead"


def _flush_subnormals(tensor: torch.Tensor) -> torch.Tensor:
    """Clear what a matrix product may lose: the sign of 0, and subnormal numbers."""
    return tensor.masked_fill(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0.0)


def _unpack_linear(module: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return [out, in] of a packed linear layer, subnormals flushed: identity times Wᵀ is Wᵀ."""
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    n_inputs = next((getattr(module, name) for name in names if hasattr(module, name)), 0)
    columns = list[torch.Tensor]()
    for start in range(0, n_inputs, _IDENTITY_ROWS):
        rows = torch.zeros(min(_IDENTITY_ROWS, n_inputs - start), n_inputs, dtype=parameter.dtype)
        rows[torch.arange(len(rows)), start + torch.arange(len(rows))] = 1
        columns.append(module.cpu_linear(rows, parameter, None))
        # A packed weight has no shape: the number of outputs is known after the first product only.
        if n_inputs * n_inputs * columns[0].shape[1] > MAX_UNPACK_MACS:
            return None
    return _flush_subnormals(torch.cat(columns).t()) if columns else None


def _split_fused(module: Any, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if type(module).__name__ != "QKVParallelLinear":
        yield "", content
        return
    queries = module.num_heads * module.head_size
    keys = module.num_kv_heads * module.head_size
    for part, rows in zip("qkv", content.split([queries, keys, keys]), strict=True):
        yield f"[{part}]", rows


def make_live_forms(model: torch.nn.Module, parallel: Any) -> dict[str, tuple[Form, bool]]:
    """Return by parameter name (function from checkpoint to live tensor, whether it is exact).

    The names are those of `digest_parameters`. If it is not exact, the function casts to the
    parameter's dtype, and the result changes whenever the parameter does: for experts packed for a
    GPU's kernel, and for all parameters if they are sharded over several workers.
    """
    is_single_worker = parallel.world_size == parallel.data_parallel_size == 1
    forms: dict[str, tuple[Form, bool]] = {}
    for name, module, key, parameter in _iterate_parameters(model):
        cast: Form = partial(torch.Tensor.to, dtype=parameter.dtype)
        form: Form | None = cast
        if _is_packed(module, key, parameter):
            form = partial(_cast_and_flush, dtype=parameter.dtype)
        elif key in ("w13_weight", "w2_weight"):
            form = _make_expert_packing(module, parameter)
        stored = (form, True) if is_single_worker and form is not None else (cast, False)
        parts = "qkv" if type(module).__name__ == "QKVParallelLinear" else ""
        for part in [f"[{p}]" for p in parts] or [""]:
            forms[name + part] = stored
    return forms


def _cast_and_flush(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _flush_subnormals(tensor.to(dtype))


def _make_expert_packing(module: Any, parameter: torch.Tensor) -> Form | None:
    """Return the packing of experts [E, in, out] for vLLM's CPU kernel; None for other kernels."""
    kernel = getattr(module.quant_method, "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    if type(experts).__name__ != "CPUUnquantizedExperts" or experts._use_zentorch:
        return None
    from vllm._custom_ops import cpu_prepack_moe_weight  # pyright: ignore[reportMissingImports]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        transposed = tensor.to(parameter.dtype).transpose(1, 2).contiguous()
        return cpu_prepack_moe_weight(transposed, experts.isa)

    return pack
