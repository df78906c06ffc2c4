# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint's tensors into a running GPT-OSS model of vLLM, completely.

vLLM reloads layer by layer: parameters become empty shapes whose `weight_loader` collects what
arrives, then each layer is built again and copied over the old one. Three parts of GPT-OSS bypass
this and keep their old values without an error:

- Experts sent as one tensor are copied directly into the empty shape. Here they are sent one expert
  at a time, which goes through the loader.
- So are the attention sinks of vLLM 0.32. Here they are passed to their loader.
- On a CPU the experts are packed for their kernel at the first load only. Here it is done at every
  load.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # pyright: ignore[reportMissingImports]

TensorStream = Iterable[tuple[str, torch.Tensor]]
LoadTensors = Callable[[TensorStream], None]

_FUSED_EXPERTS = tuple(
    matrix + end
    for matrix in ("gate_up_proj", "down_proj")
    for end in ("", "_bias", "_blocks", "_scales")
)


@contextmanager
def reload_model(model: Any, model_config: Any) -> Iterator[LoadTensors]:
    """Yield a function that loads tensors by checkpoint name, in one call or several.

    The model is complete at the end. The tensors of a layer should follow each other, or vLLM holds
    many layers' tensors at once. After an error each layer has its old weights, its new ones or
    some of both, in the memory that kernels and CUDA graphs read; the model can be loaded again.
    """
    modules = list(model.modules())
    before = [
        (dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules
    ]
    torchao = getattr(model, "_do_torchao_reload", False)
    try:
        initialize_layerwise_reload(model)
        with torch.no_grad(), repack_experts():
            yield lambda stream: model.load_weights(split_experts(load_sinks(model, stream)))
            finalize_layerwise_reload(model, model_config)
    except BaseException:
        # vLLM would otherwise lose the memory of a layer whose loading failed.
        for module, (parameters, buffers, non_persistent) in zip(modules, before, strict=True):
            module._parameters, module._buffers = parameters, buffers
            module._non_persistent_buffers_set = non_persistent
            get_layerwise_info(module).reset()
        model._do_torchao_reload = torchao
        raise


def split_experts(stream: TensorStream) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each expert of a fused tensor separately, as "….experts.7.gate_up_proj"."""
    for name, tensor in stream:
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".mlp.experts") or last not in _FUSED_EXPERTS:
            yield name, tensor
            continue
        for expert, expert_tensor in enumerate(tensor):
            yield f"{prefix}.{expert}.{last}", expert_tensor


def load_sinks(model: Any, stream: TensorStream) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass the sinks of this rank's heads to their own loader; yield the other tensors.

    vLLM 0.33 has a sink loader that slices this rank's heads itself. It is left alone: given a
    slice, it would slice again and leave -inf in the other heads.
    """
    from vllm.distributed import get_tensor_model_parallel_rank  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.model_loader import weight_utils  # pyright: ignore[reportMissingImports]

    if hasattr(weight_utils, "load_attention_sink"):
        yield from stream
        return
    parameters = dict(model.named_parameters())
    for name, tensor in stream:
        if not name.endswith(".self_attn.sinks"):
            yield name, tensor
            continue
        parameter = parameters.get(name.replace(".self_attn.", ".attn."))
        if parameter is None:  # this layer is on another worker
            continue
        heads = parameter.shape[0]
        rank_sinks = tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads)
        getattr(parameter, "weight_loader", weight_utils.default_weight_loader)(
            parameter, rank_sinks
        )


@contextmanager
def repack_experts() -> Iterator[None]:
    """Make reloads in this context pack the experts for the CPU's kernel, like the first load."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # pyright: ignore[reportMissingImports]
        UnquantizedFusedMoEMethod as Method,
    )

    stock = Method._setup_kernel

    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = self.moe_kernel is not None
        stock(self, layer, w13, w2)
        if is_reload and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    Method._setup_kernel = setup_kernel
    try:
        yield
    finally:
        Method._setup_kernel = stock
