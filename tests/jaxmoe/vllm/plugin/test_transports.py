# SPDX-License-Identifier: Apache-2.0
"""Every way of the trainer's weights into a real vLLM; GPU transports are stood in for."""

import contextlib
import ctypes
import json
import queue
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.vllm.plugin import tensor_mailbox
from jaxmoe.weight_sync.cuda_ipc import share_ipc_handles
from jaxmoe.weight_sync.dlpack import share_in_process
from jaxmoe.weight_sync.files import write_files
from jaxmoe.weight_sync.nccl import NcclGroup, broadcast_weights
from jaxmoe.weight_sync.sent_weights import SentWeights

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

GPU = "00010203-0405-0607-0809-0a0b0c0d0e0f"
PAGE = 1 << 16


def arrays(served):
    return jax.tree.map(jnp.asarray, served.fresh())


def sync_arguments(served):
    served.version += 1
    return {"dtype": "float32", "run": "ab", "version": served.version}


def check_loaded(served, update, params):
    state = served.loaded_state()
    assert state["label"] == update.label and state["stale"] == []
    assert state["received"] == update.digests
    served.params = params
    assert served.compare(new=1)[0] <= 5e-5


def test_files(served, tmp_path):
    params = arrays(served)
    with write_files(params, served.cfg, tmp_path, **sync_arguments(served)) as update:
        served.update(update.update_info)
    check_loaded(served, update, params)


def change_few(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.where(rng.random(x.shape) < 0.01, 0.9 * x, x), params)


def test_files_with_changes(served, tmp_path):
    """What a worker makes of them is verified; a damaged one changes nothing."""
    sent, params = SentWeights(tmp_path, "ab", 3), arrays(served)
    served.version += 1
    for number in range(4):
        file = sent.write(params, served.cfg, dtype="float32", version=served.version)
        assert len(file.update_info["changes"]) == number % 3
        served.update(file.update_info)
        check_loaded(served, file, params)
        params = change_few(params, number)
        served.version += 1
    label = served.loaded_state()["label"]
    file = sent.write(params, served.cfg, dtype="float32", version=served.version)
    (changes,) = (Path(folder) / "changes.bin" for folder in file.update_info["changes"])
    changes.write_bytes(changes.read_bytes()[::-1])
    served.llm.start_weight_update()
    with pytest.raises(Exception, match=r"must have (digest|the changes)"):
        served.llm.update_weights({"update_info": file.update_info})
    assert served.loaded_state()["label"] == label
    complete = sent.write_complete(served.version)
    assert complete is not None
    served.update(complete.update_info)
    check_loaded(served, complete, params)


def test_shared_in_process(served):
    params = arrays(served)
    with share_in_process(
        params, served.cfg, **sync_arguments(served), mailbox=tensor_mailbox
    ) as update:
        served.update(update.update_info)
    check_loaded(served, update, params)


@pytest.fixture
def engine(served, monkeypatch):
    """A function that puts another transfer engine into the worker."""
    import torch

    from jaxmoe.vllm.plugin import backends

    worker = served.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=GPU))

    def put(name):
        transfer_engine = getattr(backends, name)(
            worker.vllm_config.weight_transfer_config,
            worker.vllm_config,
            torch.device("cpu", 0),
            worker.model_runner.get_model(),
        )
        monkeypatch.setattr(worker, "weight_transfer_engine", transfer_engine)
        return transfer_engine

    return put


class Wire:
    """libnccl and libcudart at one end, vLLM's communicator at the other."""

    def __init__(self):
        self.sent = queue.Queue()

    def __getattr__(self, name):
        return lambda *_: 0

    def ncclCommInitRank(self, out, *_):
        out._obj.value = 1
        return 0

    def ncclBroadcast(self, send, receive, count, kind, *_):
        self.sent.put(ctypes.string_at(send.value, 4 * count.value))
        return 0

    def broadcast(self, tensor, src, stream=None):
        import torch

        data = self.sent.get(timeout=60)
        assert src == 0 and len(data) == 4 * tensor.numel()
        tensor.view(-1).view(torch.uint8).copy_(
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
        )

    def destroy(self):
        pass


def test_nccl(served, engine):
    params, wire = arrays(served), Wire()
    group = NcclGroup(1, nccl=wire, cudart=wire)
    group.join()
    engine("NcclTransfer").model_update_group = wire
    update = broadcast_weights(group, params, served.cfg, **sync_arguments(served))
    sender = threading.Thread(target=update.send)
    sender.start()
    served.update(json.loads(json.dumps(update.update_info)))
    sender.join()
    assert wire.sent.empty()
    check_loaded(served, update, params)


class Driver:
    """A handle is the address of its allocation, so both sides can be in one process."""

    def __init__(self):
        self.open = []

    def __getattr__(self, name):
        return lambda *_: 0

    def cuDeviceGetUuid_v2(self, out, _):
        ctypes.memmove(out, bytes(range(16)), 16)
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value = address.value // PAGE * PAGE
        return 0

    def cuIpcGetMemHandle(self, out, base):
        ctypes.memmove(out, base.value.to_bytes(64, "little"), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, out, handle, flags):
        out._obj.value = int.from_bytes(bytes(handle.reserved), "little")
        self.open.append(out._obj.value)
        return 0

    def cuIpcCloseMemHandle(self, base):
        self.open.remove(base.value)
        return 0


def test_memory_of_one_gpu(served, engine, monkeypatch):
    import torch

    from jaxmoe.vllm.plugin import direct, ipc_memory

    def view(address, nbytes):
        raw = (ctypes.c_ubyte * nbytes).from_address(address)
        return torch.from_numpy(np.frombuffer(raw, np.uint8))

    params, driver = arrays(served), Driver()
    monkeypatch.setattr(
        direct,
        "open_shared_tensors",
        partial(ipc_memory.open_shared_tensors, driver=driver, view=view),
    )
    engine("IpcTransfer")
    with share_ipc_handles(params, served.cfg, driver=driver, **sync_arguments(served)) as update:
        served.update(json.loads(json.dumps(update.update_info)))
    assert driver.open == []
    check_loaded(served, update, params)
