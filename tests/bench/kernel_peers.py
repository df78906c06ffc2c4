# SPDX-License-Identifier: Apache-2.0
"""Peers of the kernels, for `python -m pallas_kernels.bench OP --vs tests.bench.kernel_peers:NAME`.

    hf_eager      transformers' eager attention with sinks (T² memory)
    flex          torch FlexAttention, the sink from its lse; on a CPU forward only
    cudnn         jax.nn's cuDNN attention on CUDA; no sinks, no packing: a speed to hold against
    grouped_mm    torch._grouped_mm and the bias, as transformers' grouped_mm experts
    ragged_dot    jax.lax.ragged_dot and the bias
    cross_entropy logits whole, log-softmax: what token_logprobs replaces (jax)

Each is `function(case, inputs, cotangents) -> {pass: run}`; runs wait for what they return.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _torch(x: Any) -> Any:
    import torch

    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int8)
    return torch.from_dlpack(x)


def _of_torch(
    forward: Any, leaves: list[Any], cts: list[Any], *, backward: bool = True
) -> dict[str, Any]:
    """Forward and backward passes of a torch function whose outputs match `cts`, None for none."""
    import torch

    leaves = [x.detach().clone().requires_grad_(backward) for x in leaves]

    def run_forward() -> Any:
        with torch.no_grad():
            return _wait_only(forward(*leaves))

    if not backward:
        return {"forward": run_forward}
    outputs = forward(*leaves)
    pairs = [(o, c) for o, c in zip(outputs, cts, strict=True) if o is not None]

    def run_backward() -> Any:
        return _wait_only(
            torch.autograd.grad(
                [o for o, _ in pairs], leaves, [c for _, c in pairs], retain_graph=True
            )
        )

    return {"forward": run_forward, "backward": run_backward}


def _wait_only(results: Any) -> list[Any]:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [None if x is None else HostArray(x) for x in results]


class HostArray:
    """A torch tensor that numpy reads on demand: timing pays for no copy."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.tensor.detach().float().cpu().numpy().astype(dtype or np.float32)


def _seen(case: Any, q_pos: Any, k_pos: Any, q_seg: Any, k_seg: Any) -> Any:
    from pallas_kernels.masks import visible

    return visible(
        q_pos[:, :, None], k_pos[:, None, :], case.window, q_seg[:, :, None], k_seg[:, None, :]
    )


def hf_eager(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """The attention of transformers' GptOss, eager; returns no lse."""
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v, sink, *places = inputs
    floor = torch.finfo(_torch(q).dtype).min
    bias = torch.where(_torch(_seen(case, *places)).bool(), 0.0, floor)[:, None].to(_torch(q).dtype)

    class Layer(torch.nn.Module):
        num_key_value_groups = case.N // case.K

    def forward(q: Any, k: Any, v: Any, sink: Any) -> Any:
        layer = Layer()
        layer.sinks = sink.to(q.dtype)
        o, _ = eager_attention_forward(
            layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias,
            scaling=case.H**-0.5,
        )  # fmt: skip
        return o, None

    return _of_torch(forward, [_torch(x) for x in (q, k, v, sink)],
                     [_torch(x) for x in cotangents])  # fmt: skip


def flex(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """FlexAttention and its lse, the sink folded in after it."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, sink, *places = inputs
    q_pos, k_pos, q_seg, k_seg = (_torch(x) for x in places)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = (q_seg[b, i] == k_seg[b, j]) & (k_seg[b, j] > 0) & (k_pos[b, j] <= q_pos[b, i])
        return seen & ((q_pos[b, i] - k_pos[b, j] < case.window) | (case.window == 0))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = create_block_mask(mask, case.B, None, case.T, case.S, device=device)
    attention = torch.compile(flex_attention) if device == "cuda" else flex_attention

    def forward(q: Any, k: Any, v: Any, sink: Any) -> Any:
        o, lse = attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=blocks,
            enable_gqa=True, return_lse=True, scale=case.H**-0.5,
        )  # fmt: skip
        keep = torch.sigmoid(lse - sink[None, :, None])[..., None].to(o.dtype)
        return (o * keep).transpose(1, 2), torch.logaddexp(lse, sink[None, :, None]).mT

    return _of_torch(forward, [_torch(x) for x in (q, k, v, sink)],
                     [_torch(x) for x in cotangents], backward=device == "cuda")  # fmt: skip


def grouped_mm(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """torch._grouped_mm; the bias by repetition."""
    import torch

    lhs, rhs, bias, sizes = inputs
    sizes_E = _torch(sizes).long()
    ends = sizes_E.cumsum(0).to(torch.int32)

    def forward(lhs: Any, rhs: Any, bias: Any) -> Any:
        out = torch._grouped_mm(lhs, rhs, offs=ends)
        return (out + torch.repeat_interleave(bias, sizes_E, dim=0, output_size=lhs.shape[0]),)

    return _of_torch(forward, [_torch(x) for x in (lhs, rhs, bias)], [_torch(cotangents)])


def _of_jax(call: Any, inputs: Any, cotangents: Any, differentiated: int) -> dict[str, Any]:
    n = differentiated
    forward = jax.jit(call)
    _, pull = jax.jit(lambda *x: jax.vjp(lambda *d: call(*d, *x[n:]), *x[:n]))(*inputs)
    back = jax.jit(lambda pull, ct: pull(ct))
    return {
        "forward": lambda: jax.block_until_ready(forward(*inputs)),
        "backward": lambda: jax.block_until_ready(back(pull, cotangents)),
    }


def ragged_dot(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """jax.lax.ragged_dot; the bias by repetition."""

    def call(lhs: Any, rhs: Any, bias: Any, sizes: Any) -> Any:
        rows = jnp.repeat(bias, sizes, axis=0, total_repeat_length=lhs.shape[0])
        return jax.lax.ragged_dot(lhs, rhs, sizes) + rows

    return _of_jax(call, inputs, cotangents, 3)


def cudnn(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """cuDNN through jax.nn, causal, without the sink: not the same function, the same work."""

    def call(q: Any, k: Any, v: Any, *_: Any) -> Any:
        window = (case.window - 1, 0) if case.window else None
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation="cudnn"
        )

    return _of_jax(call, inputs, cotangents[0], 3)


def cross_entropy(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """All logits in float32, then log-softmax and entropy."""

    def call(hidden: Any, head: Any, targets: Any) -> Any:
        z = jnp.dot(hidden, head[:, : case.vocab_size], preferred_element_type=jnp.float32)
        logp = jax.nn.log_softmax(z / case.temperature, axis=-1)
        chosen = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=1)

    return _of_jax(call, inputs, cotangents, 2)
