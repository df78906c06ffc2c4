# SPDX-License-Identifier: Apache-2.0
"""Peers of the kernels, for `python -m benchmarks.kernels OP --vs benchmarks.kernel_peers:NAME`.

    hf_eager      transformers' eager attention with sinks (T² memory)
    flex          torch FlexAttention, the sink from its lse; on a CPU forward only
    cudnn         jax.nn's cuDNN attention on CUDA; no sinks, no packing: a speed to hold against
    cudnn_sink    cuDNN's attention with its own sink (nvidia-cudnn-frontend, torch); no packing
    tokamax       tokamax' Pallas attention; no sinks, no packing: a speed to hold against
    without_sink  our own kernel, the sink fixed at -inf: what a sink costs
    grouped_mm    torch's grouped_mm and the bias, as transformers' grouped_mm experts
    hf_experts    transformers' GptOss experts up to the gate, grouped_mm: for grouped_swiglu
    ragged_dot    jax.lax.ragged_dot and the bias
    cross_entropy logits whole, log-softmax: what token_logprobs replaces (jax)

Each is `function(case, inputs, cotangents) -> {pass: run}`; runs wait for what they return. What a
peer cannot do it refuses in one line, by NotImplementedError or ImportError. Those of torch share
the device with JAX: start them with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _torch(x: Any) -> Any:
    import torch

    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int8)
    return torch.from_dlpack(x)


@contextlib.contextmanager
def _refusing_out_of_memory() -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotImplementedError(str(error).partition("\n")[0]) from error


def _of_torch(
    forward: Any, leaves: list[Any], cts: list[Any], *, backward: bool = True
) -> dict[str, Any]:
    """Forward and backward passes of a torch function whose outputs match `cts`, None for none."""
    import torch

    leaves = [x.detach().clone().requires_grad_(backward) for x in leaves]

    def run_forward() -> Any:
        with torch.no_grad(), _refusing_out_of_memory():
            return _wait_only(forward(*leaves))

    if not backward:
        return {"forward": run_forward}
    with _refusing_out_of_memory():
        outputs = forward(*leaves)
    pairs = [(o, c) for o, c in zip(outputs, cts, strict=True) if o is not None]

    def run_backward() -> Any:
        with _refusing_out_of_memory():
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


class Interleaved(HostArray):
    """One whose last axis holds gate and up in turn, read as their halves."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        x = super().__array__(dtype, copy)
        return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _causal_rows_only(case: Any) -> None:
    if case.layout != "causal" or case.T != case.S:
        raise NotImplementedError(
            f"it takes whole causal rows without padding; this is {case.layout}, "
            f"{case.T} queries on {case.S} keys"
        )


def _needs(*platforms: str) -> None:
    if jax.default_backend() not in platforms:
        raise NotImplementedError(
            f"it needs {' or '.join(platforms)}; this is {jax.default_backend()}"
        )


def _seen(case: Any, q_pos: Any, k_pos: Any, q_seg: Any, k_seg: Any) -> Any:
    from pallas_kernels.masks import is_visible

    return is_visible(
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
            layer,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            bias,
            scaling=case.H**-0.5,
        )
        return o, None

    return _of_torch(forward, [_torch(x) for x in (q, k, v, sink)], [_torch(x) for x in cotangents])


@functools.lru_cache(maxsize=1)
def _compile_flex(case: Any) -> Any:
    """FlexAttention compiled for one case, and once for all rounds of it."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    # torch keeps what it compiled by function: after another case it would compile for any shape,
    # and after eight it would not compile at all.
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def flex(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """FlexAttention and its lse, the sink folded in after it."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q, k, v, sink, *places = inputs
    q_pos, k_pos, q_seg, k_seg = (_torch(x) for x in places)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = (q_seg[b, i] == k_seg[b, j]) & (k_seg[b, j] > 0) & (k_pos[b, j] <= q_pos[b, i])
        return seen & ((q_pos[b, i] - k_pos[b, j] < case.window) | (case.window == 0))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = create_block_mask(mask, case.B, None, case.T, case.S, device=device)
    attention: Any = _compile_flex(case) if device == "cuda" else flex_attention

    def forward(q: Any, k: Any, v: Any, sink: Any) -> Any:
        o, aux = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            block_mask=blocks,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
            scale=case.H**-0.5,
        )
        lse = aux.lse
        keep = torch.sigmoid(lse - sink[None, :, None])[..., None].to(o.dtype)
        return (o * keep).transpose(1, 2), torch.logaddexp(lse, sink[None, :, None]).mT

    return _of_torch(
        forward,
        [_torch(x) for x in (q, k, v, sink)],
        [_torch(x) for x in cotangents],
        backward=device == "cuda",
    )


def grouped_mm(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """torch's grouped_mm, under its older name before torch 2.10; the bias by repetition."""
    import torch

    lhs, rhs, bias, sizes = inputs
    sizes_E = _torch(sizes).long()
    ends = sizes_E.cumsum(0).to(torch.int32)
    older: Any = getattr(torch, "_grouped_mm", None)
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", older)

    def forward(lhs: Any, rhs: Any, bias: Any) -> Any:
        out = grouped_mm(lhs, rhs, offs=ends)
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


def _of_jax_attention(call: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """Runs of a function of q, k, v that has neither lse nor sinks."""
    runs = _of_jax(call, inputs, cotangents[0], 3)
    return {
        "forward": lambda: [runs["forward"](), None],
        "backward": lambda: [*runs["backward"](), None],
    }


def cudnn(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """cuDNN through jax.nn, causal, without the sink: not the same function, the same work."""
    _needs("gpu")
    _causal_rows_only(case)

    def call(q: Any, k: Any, v: Any, *_: Any) -> Any:
        window = (case.window - 1, 0) if case.window else None
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation="cudnn"
        )

    return _of_jax_attention(call, inputs, cotangents)


def tokamax(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """tokamax' Pallas kernel, causal, without the sink: not the same function, the same work."""
    _needs("gpu", "tpu")
    _causal_rows_only(case)
    from tokamax import dot_product_attention  # pyright: ignore[reportMissingImports]

    def call(q: Any, k: Any, v: Any, *_: Any) -> Any:
        window = (case.window - 1, 0) if case.window else None
        return dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation="mosaic"
        )

    return _of_jax_attention(call, inputs, cotangents)


def without_sink(
    case: Any, inputs: Any, cotangents: Any, impl: str = "mosaic_gpu"
) -> dict[str, Any]:
    """sink_attention with sinks of -inf and no gradient to them."""
    from pallas_kernels import sink_attention

    def call(
        q: Any, k: Any, v: Any, sink: Any, q_pos: Any, k_pos: Any, q_seg: Any, k_seg: Any
    ) -> Any:
        return sink_attention(
            q,
            k,
            v,
            jnp.full_like(sink, -jnp.inf),
            q_positions_BT=q_pos,
            k_positions_BS=k_pos,
            q_segment_ids_BT=q_seg,
            k_segment_ids_BS=k_seg,
            window=case.window or None,
            impl=impl,
        )

    return _of_jax(call, inputs, cotangents, 3)


def cudnn_sink(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """cuDNN's fused attention and its gradient, that of the sink too; BTNH arrays as they lie."""
    _needs("gpu")
    _causal_rows_only(case)
    import cudnn as frontend  # pyright: ignore[reportMissingImports]
    import torch

    q, k, v, sink = (_torch(x) for x in inputs[:4])
    q, k, v, ct = (x.transpose(1, 2) for x in (q, k, v, _torch(cotangents[0])))
    sink = sink.reshape(1, case.N, 1, 1)
    stats = torch.empty(case.B, case.N, case.T, 1, device="cuda")
    o, dq, dk, dv, dsink = (torch.empty_like(x) for x in (q, q, k, v, sink))
    plans = _cudnn_graphs(
        frontend,
        case,
        {"q": q, "k": k, "v": v, "sink_token": sink},
        (o, stats),
        {"o": o, "dO": ct, "stats": stats, "dSink_token": dsink},
        (dq, dk, dv),
    )
    runs = []
    for graph, pack in plans:
        try:
            graph.build([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
        except frontend.cudnnGraphNotSupportedError as error:
            raise NotImplementedError(str(error)) from error
        space = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
        runs.append(lambda graph=graph, pack=pack, space=space: graph.execute(pack, space))
    forward, backward = runs
    forward()  # or the backward's first run has no o and stats

    def run_forward() -> Any:
        forward()
        return _wait_only([o.transpose(1, 2), stats[..., 0].transpose(1, 2)])

    def run_backward() -> Any:
        backward()
        return _wait_only([*(x.transpose(1, 2) for x in (dq, dk, dv)), dsink.reshape(-1)])

    return {"forward": run_forward, "backward": run_backward}


def _cudnn_graphs(
    frontend: Any, case: Any, given: Any, out: Any, back: Any, gradients: Any
) -> list[tuple[Any, Any]]:
    """Forward and backward graphs, not yet built, and what buffer each tensor of them has."""
    import torch

    types = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}

    def type_of(x: Any) -> Any:
        return getattr(frontend.data_type, types[x.dtype])

    # a key is seen where query - left_bound < key <= query: our window, the query counted
    band = {
        "attn_scale": case.H**-0.5,
        "diagonal_band_right_bound": 0,
        "diagonal_alignment": frontend.diagonal_alignment.TOP_LEFT,
    } | ({"diagonal_band_left_bound": case.window} if case.window else {})
    plans = []
    for name, arrays, results, options in (
        ("sdpa", given, out, {"generate_stats": True}),
        ("sdpa_backward", given | back, gradients, {}),
    ):
        wide = frontend.data_type.FLOAT
        graph = frontend.pygraph(
            io_data_type=type_of(given["q"]), intermediate_data_type=wide, compute_data_type=wide
        )
        tensors = {
            key: graph.tensor(
                name=key, dim=list(x.shape), stride=list(x.stride()), data_type=type_of(x)
            )
            for key, x in arrays.items()
        }
        made = getattr(graph, name)(**tensors, **band, **options)
        for tensor, x in zip(made, results, strict=True):
            tensor.set_output(True).set_data_type(type_of(x))
            tensor.set_dim(list(x.shape)).set_stride(list(x.stride()))
        pack = {tensors[key]: x for key, x in arrays.items()}
        plans.append((graph, pack | dict(zip(made, results, strict=True))))
    return plans


def hf_experts(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """transformers' grouped linear layer and gate; weights in its own, interleaved order."""
    from types import SimpleNamespace

    import torch
    from transformers.integrations.moe import _grouped_linear
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    if sum(case.group_sizes) != case.M:
        raise NotImplementedError("it leaves rows past the groups as they are; this case has some")
    lhs, rhs, bias, sizes = (_torch(x) for x in inputs)
    ends = sizes.cumsum(0).to(torch.int32)
    experts = torch.repeat_interleave(sizes.long(), output_size=case.M)
    layer = SimpleNamespace(alpha=1.702, limit=7.0)
    theirs: Any = GptOssExperts  # a type checker takes what a Module has for tensors

    def in_turn(x: Any) -> Any:
        return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)

    def forward(lhs: Any, rhs: Any, bias: Any) -> Any:
        both = _grouped_linear(lhs, rhs, ends, bias=bias[experts], is_transposed=True)
        return (theirs._apply_gate(layer, both),)

    runs = _of_torch(forward, [lhs, in_turn(rhs), in_turn(bias)], [_torch(cotangents)])

    def run_backward() -> Any:
        dlhs, *others = runs["backward"]()
        return [dlhs, *(Interleaved(x.tensor) for x in others)]

    return {"forward": runs["forward"], "backward": run_backward}


def cross_entropy(case: Any, inputs: Any, cotangents: Any) -> dict[str, Any]:
    """All logits in float32, then log-softmax and entropy."""

    def call(hidden: Any, head: Any, targets: Any) -> Any:
        z = jnp.dot(hidden, head[:, : case.vocab_size], preferred_element_type=jnp.float32)
        logp = jax.nn.log_softmax(z / case.temperature, axis=-1)
        chosen = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=1)

    return _of_jax(call, inputs, cotangents, 2)
