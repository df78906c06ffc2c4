# SPDX-License-Identifier: Apache-2.0
"""vLLM's NCCL and IPC engines with our loading, over transports that stand in for a GPU's."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class NcclGroup:
    """Broadcasts of rank 0, one tensor after another, or joined as vLLM packs them."""

    def __init__(self, tensors):
        import torch

        self.bytes = torch.from_numpy(np.concatenate([a.view(np.uint8).ravel() for a in tensors]))
        self.offset = 0

    def broadcast(self, tensor, src, stream=None):
        import torch

        assert src == 0
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_(self.bytes[self.offset : self.offset + raw.numel()])
        self.offset += raw.numel()

    def destroy(self):
        self.offset = None


@pytest.fixture
def direct(served, monkeypatch):
    """(worker, a function that puts another engine into it)."""
    import torch
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

    from jaxmoe.vllm.plugin import backends

    worker = served.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    config = worker.vllm_config
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda _, n: [stream] * n)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="gpu-0")
    )
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", lambda *handle: handle[0])

    def put(name):
        engine = getattr(backends, name)(
            config.weight_transfer_config, config, worker.device, worker.model_runner.get_model()
        )
        monkeypatch.setattr(worker, "weight_transfer_engine", engine)
        return engine

    return put


def announced(served, tensors, digests=True):
    served.version += 1
    manifest = served.manifest(tensors)
    for tensor in manifest["tensors"].values():
        tensor["digest"] = tensor["digest"] if digests else ""
    return {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(a.shape) for a in tensors.values()],
        "manifest": manifest,
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("digests", [False, True])
def test_broadcast_weights_arrive_whole_and_are_looked_at(served, direct, packed, digests):
    engine, params = direct("NcclTransfer"), served.fresh()
    tensors = served.tensors(params)
    engine.packed, engine.packed_buffer_size_bytes = packed, 200_000
    engine.model_update_group = NcclGroup(list(tensors.values()))
    served.update(announced(served, tensors, digests))
    state, served.params = served.loaded_state(), params
    assert state["label"] == f"ab:{served.version}" and state["stale"] == []
    expected_digests = {n: t["digest"] for n, t in served.manifest(tensors)["tensors"].items()}
    assert state["received"] == expected_digests
    assert served.compare(new=1)[0] <= 5e-5


def test_a_damaged_broadcast_is_drained_and_refused(served, direct):
    engine, params = direct("NcclTransfer"), served.fresh()
    tensors = served.tensors(params)
    engine.model_update_group = group = NcclGroup(list(tensors.values()))
    group.bytes[2] ^= 1  # of the embedding, which comes first
    with pytest.raises(Exception, match="model.embed_tokens.weight must have digest"):
        served.update(announced(served, tensors))
    assert group.offset == len(group.bytes)  # nobody waits for us
    assert served.loaded_state()["label"] is None
    engine.model_update_group = NcclGroup(list(tensors.values()))
    served.update(announced(served, tensors))
    assert served.loaded_state()["stale"] == [] and served.loaded_state()["label"] is not None


@pytest.mark.parametrize("missing", ["names", "manifest"])
def test_half_a_projection_is_rejected_before_any_broadcast(served, direct, missing):
    engine, before = direct("NcclTransfer"), served.loaded_state()["live"]
    tensors = served.tensors(served.fresh())
    engine.model_update_group = group = NcclGroup(list(tensors.values()))
    key = "model.layers.1.self_attn.k_proj.weight"
    info = announced(served, tensors)
    if missing == "names":
        index = info["names"].index(key)
        for field in ("names", "dtype_names", "shapes"):
            del info[field][index]
    else:
        del info["manifest"]["tensors"][key]
    with pytest.raises(Exception, match=key):
        served.update(info)
    assert group.offset == 0 and served.loaded_state()["live"] == before


def test_gpu_shared_memory_is_opened_and_released(served, direct):
    import torch

    engine, params = direct("IpcTransfer"), served.fresh()
    tensors = served.tensors(params)
    handles = [
        {"gpu-0": (torch.from_numpy(a.copy()), 1, 2, 3, 4, 5, None)} for a in tensors.values()
    ]
    engine.device = torch.device("cpu", 0)
    served.update(announced(served, tensors) | {"ipc_handles": handles})
    state, served.params = served.loaded_state(), params
    assert state["label"] == f"ab:{served.version}" and state["stale"] == []
    assert served.compare(new=1)[0] <= 5e-5
