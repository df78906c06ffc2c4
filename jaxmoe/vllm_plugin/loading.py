# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors into a running GPT-OSS model of vLLM, whole.

vLLM reloads layer by layer: parameters become empty shapes whose `weight_loader` collects what
arrives, then each layer is built anew and copied over the old. Three things of GPT-OSS pass by
that and keep their old values without an error:
  - experts sent as one tensor are copied straight into the empty shape: they are sent one expert
    at a time, which goes through the loader;
  - so are the attention sinks of vLLM 0.32: they are given to their loader here;
  - on a CPU the experts are packed for their kernel at the first load only: here at each.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
    get_layerwise_info,
)

Stream = Iterable[tuple[str, torch.Tensor]]
Take = Callable[[Stream], None]

_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


@contextmanager
def reload(model: Any, model_config: Any) -> Iterator[Take]:
    """Gives what takes tensors by checkpoint name, in one go or several; whole at the end.

    Those of a layer should follow each other, or vLLM holds many layers' at once. Where it breaks
    off each layer has its old weights, its new ones or some of both, in the memory that kernels
    and CUDA graphs read; the model can be loaded again.
    """
    modules = list(model.modules())
    before = [
        (dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules
    ]
    torchao = getattr(model, "_do_torchao_reload", False)
    try:
        initialize_layerwise_reload(model)
        with torch.no_grad(), experts_packed():
            yield lambda stream: model.load_weights(one_by_one(sinks_aside(model, stream)))
            finalize_layerwise_reload(model, model_config)
    except BaseException:
        # vLLM would forget the memory of a layer that failed in the middle
        for module, (parameters, buffers, passing) in zip(modules, before, strict=True):
            module._parameters, module._buffers = parameters, buffers
            module._non_persistent_buffers_set = passing
            get_layerwise_info(module).reset()
        model._do_torchao_reload = torchao
        raise


def one_by_one(stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
    """Each expert of a fused tensor by itself, "….experts.7.gate_up_proj"."""
    for name, tensor in stream:
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".mlp.experts") or last not in _EXPERTS:
            yield name, tensor
            continue
        for expert, alone in enumerate(tensor):
            yield f"{prefix}.{expert}.{last}", alone


def sinks_aside(model: Any, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the sinks of this rank's heads to their own loader; pass on the rest.

    A vLLM whose sinks have a loader that takes this rank's heads (0.33) needs no help: of heads
    that were taken before it would take a part again, and leave -inf in the others.
    """
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        get_tensor_model_parallel_rank,
    )
    from vllm.model_executor.model_loader import (  # pyright: ignore[reportMissingImports]
        weight_utils,
    )

    if hasattr(weight_utils, "load_attention_sink"):
        yield from stream
        return
    parameters = dict(model.named_parameters())
    for name, tensor in stream:
        if not name.endswith(".self_attn.sinks"):
            yield name, tensor
            continue
        parameter = parameters.get(name.replace(".self_attn.", ".attn."))
        if parameter is None:  # of a layer that another worker has
            continue
        heads = parameter.shape[0]
        mine = tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads)
        getattr(parameter, "weight_loader", weight_utils.default_weight_loader)(parameter, mine)


@contextmanager
def experts_packed() -> Iterator[None]:
    """While this lasts, a reload packs the experts for the CPU's kernel as the first load did."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (  # pyright: ignore[reportMissingImports]
        UnquantizedMoeBackend,
    )
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # pyright: ignore[reportMissingImports]
        UnquantizedFusedMoEMethod as Method,
    )

    stock = Method._setup_kernel

    def setup(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        stock(self, layer, w13, w2)
        if again and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    Method._setup_kernel = setup
    try:
        yield
    finally:
        Method._setup_kernel = stock
