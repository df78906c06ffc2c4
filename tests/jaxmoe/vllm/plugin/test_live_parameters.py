# SPDX-License-Identifier: Apache-2.0
"""Digests of tensors wherever they are, and of matrices that only a product still shows."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxmoe.weight_sync.checksum import digest_array

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 11, 13), (4, 1023)])
def test_tensor_digests_are_equal_on_every_device(monkeypatch, dtype, shape):
    import torch

    from jaxmoe.vllm.plugin import live_parameters

    tensor = torch.randn(shape, generator=torch.manual_seed(0)).to(getattr(torch, dtype))
    want = digest_array(tensor.view(torch.uint8).numpy())
    assert live_parameters.digest_tensor(tensor) == want
    monkeypatch.setattr(live_parameters, "_WORDS_PER_CHUNK", 100)  # several sums
    raw = tensor.reshape(-1).view(torch.uint8)
    assert live_parameters._digest_on_device(raw) == want
    turned = tensor.reshape(-1, 1).expand(-1, 2)
    assert live_parameters.digest_tensor(turned) == digest_array(
        turned.contiguous().view(torch.uint8).numpy()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(300, 37), (64, 192), (7, 160)])
def test_packed_matrices_are_read_bitwise_unless_too_large(monkeypatch, dtype, sizes):
    import torch
    from vllm import _custom_ops as ops

    from jaxmoe.vllm.plugin import live_parameters

    summed, out = sizes
    weight = torch.randn(out, summed, generator=torch.manual_seed(1)).to(getattr(torch, dtype))
    weight[0, 0], weight[-1, -1] = 1e-30, -3e30
    small = weight.clone()
    small[0, 1:4] = torch.tensor([-0.0, 1e-40, -1e-39])
    weight[0, 1:4] = 0
    try:
        handler = ops.create_onednn_mm(small.t(), 32)
    except RuntimeError as error:
        if dtype == "float32" or "primitive descriptor" not in str(error):
            raise
        pytest.skip(
            f"oneDNN has no {dtype} product for this processor, so vLLM packs none: {error}"
        )
    layer = SimpleNamespace(
        cpu_linear=lambda x, w, b: ops.onednn_mm(handler, x, b), input_size=summed, tp_size=1
    )
    empty = torch.empty(0, dtype=weight.dtype)
    content = live_parameters._read_parameter(layer, "weight", empty)
    assert content is not None and torch.equal(content, weight)
    assert live_parameters.digest_tensor(content) == digest_array(weight.view(torch.uint8).numpy())
    form = live_parameters._cast_and_flush(small.float(), weight.dtype)
    assert live_parameters.digest_tensor(form) == live_parameters.digest_tensor(content)
    monkeypatch.setattr(live_parameters, "MAX_UNPACK_MACS", summed * summed * out - 1)
    assert live_parameters._read_parameter(layer, "weight", empty) is None


def test_live_forms_are_exact_for_one_worker_only():
    import torch

    from jaxmoe.vllm.plugin import live_parameters

    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    single, two = (SimpleNamespace(world_size=n, data_parallel_size=1) for n in (1, 2))
    for workers, is_exact in ((single, True), (two, False)):
        for form, exact in live_parameters.make_live_forms(model, workers).values():
            assert exact == is_exact and form(torch.ones(2)).dtype == torch.bfloat16
    digests, unreadable = live_parameters.digest_parameters(model)
    weight = model.weight.detach().view(torch.int16).numpy()
    assert digests[".weight"] == digest_array(np.ascontiguousarray(weight)) and unreadable == []
