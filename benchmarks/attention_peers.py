# SPDX-License-Identifier: Apache-2.0
"""Attention of torch itself, as kernel_peers.py: `--vs benchmarks.attention_peers:NAME`.

    sdpa         torch's scaled_dot_product_attention, by FlashAttention or else cuDNN
    sdpa_flash   the same by FlashAttention alone
    sdpa_cudnn   the same by cuDNN alone

No sinks, windows or packing: whole causal rows, a speed to hold against and not the same function.
torch and JAX share the device, so start it with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

from typing import Any

from benchmarks.kernel_peers import _causal_rows_only, _needs, _of_torch, _torch


def sdpa(
    case: Any, inputs: Any, cotangents: Any, backends: tuple[str, ...] = ("flash", "cudnn")
) -> dict[str, Any]:
    """Causal attention without the sink, query heads grouped by `enable_gqa`; returns no lse."""
    _needs("gpu", *(["cpu"] if "math" in backends else []))
    _causal_rows_only(case)
    if case.window:
        raise NotImplementedError(f"it has no window; this case has one of {case.window}")
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    chosen = [kinds[name] for name in backends]

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen, set_priority=True):
            o = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                scale=case.H**-0.5,
                enable_gqa=True,
            )
        return o.transpose(1, 2), None

    leaves = [_torch(x) for x in inputs[:3]]
    try:
        runs = _of_torch(forward, leaves, [_torch(x) for x in cotangents])
    except RuntimeError as error:  # "No available kernel", for a type, a head size or this device
        if "kernel" not in str(error):
            raise
        raise NotImplementedError(str(error).partition("\n")[0]) from error
    return {"forward": runs["forward"], "backward": lambda: [*runs["backward"](), None]}


def sdpa_flash(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """`sdpa` by FlashAttention, as torch has it built in."""
    return sdpa(case, inputs, cotangents, ("flash",))


def sdpa_cudnn(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """`sdpa` by cuDNN."""
    return sdpa(case, inputs, cotangents, ("cudnn",))
