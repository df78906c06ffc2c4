# SPDX-License-Identifier: Apache-2.0
"""Shared GPU memory by a driver that writes its calls down, over the memory of this process."""

import base64
import ctypes
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weight_updates import sent_tensors

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.model.params import map_specs
from jaxmoe.weight_sync.checksum import digest_array
from jaxmoe.weight_sync.cuda_ipc import share_ipc_handles
from tests.jaxmoe.small_models import TEN_EXPERTS

CFG = TEN_EXPERTS
GPU = "00010203-0405-0607-0809-0a0b0c0d0e0f"
PAGE = 1 << 16  # the driver's allocations begin at multiples of this


class Fake:
    """A handle is the address of its allocation, so both sides can be in one process."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, list[tuple]()

    def record_call(self, name: str, *arguments) -> int:
        self.calls.append((name, *arguments))
        return 201 if name == self.fails else 0

    def cuInit(self, flags):
        return self.record_call("cuInit")

    def cuDeviceGet(self, out, ordinal):
        out._obj.value = ordinal.value
        return self.record_call("cuDeviceGet", ordinal.value)

    def cuDeviceGetUuid_v2(self, out, number):
        ctypes.memmove(out, bytes(range(16)), 16)
        return self.record_call("cuDeviceGetUuid_v2", number.value)

    def cuDevicePrimaryCtxRetain(self, out, number):
        out._obj.value = 99
        return self.record_call("cuDevicePrimaryCtxRetain", number.value)

    def cuCtxSetCurrent(self, context):
        return self.record_call("cuCtxSetCurrent", context.value)

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value = address.value // PAGE * PAGE
        return self.record_call("cuMemGetAddressRange_v2")

    def cuIpcGetMemHandle(self, out, base):
        ctypes.memmove(out, base.value.to_bytes(64, "little"), 64)
        return self.record_call("cuIpcGetMemHandle", base.value)

    def cuIpcOpenMemHandle_v2(self, out, handle, flags):
        out._obj.value = int.from_bytes(bytes(handle.reserved), "little")
        return self.record_call("cuIpcOpenMemHandle_v2", out._obj.value, flags.value)

    def cuIpcCloseMemHandle(self, base):
        return self.record_call("cuIpcCloseMemHandle", base.value)


def random_params():
    rng = np.random.default_rng(0)
    return map_specs(lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32)), CFG)


def update(fake, params=None, **options):
    params = random_params() if params is None else params
    return share_ipc_handles(
        params, CFG, dtype="bfloat16", run="ab", version=5, driver=fake, **options
    )


def test_each_handle_and_offset_name_the_tensors_bytes():
    params, fake = random_params(), Fake()
    shared = update(fake, params)
    info = json.loads(json.dumps(shared.update_info))
    for (name, want), *received, place in zip(
        sent_tensors(params, CFG, "bfloat16"),
        info["names"],
        info["dtype_names"],
        info["shapes"],
        info["ipc_handles"],
        strict=True,
    ):
        assert received == [name, str(want.dtype), list(want.shape)] and list(place) == [GPU]
        handle, offset = place[GPU]
        base = int.from_bytes(base64.b64decode(handle), "little")
        assert base % PAGE == 0
        assert ctypes.string_at(base + offset, want.nbytes) == want.tobytes(), name
        assert shared.digests[name] == digest_array(want)
    assert info["manifest"] == shared.manifest


def test_the_driver_reports_on_the_weights_device():
    fake, device = Fake(), jax.local_devices()[2]
    update(fake, device=device)
    number = device.local_hardware_id
    assert fake.calls[:5] == [
        ("cuInit",),
        ("cuDeviceGet", number),
        ("cuDeviceGetUuid_v2", number),
        ("cuDevicePrimaryCtxRetain", number),
        ("cuCtxSetCurrent", 99),
    ]


def test_closing_lets_the_copy_on_the_device_go():
    params = random_params()
    before = {id(array) for array in jax.live_arrays()}
    with update(Fake(), params) as shared:
        assert len(jax.live_arrays()) >= len(before) + len(shared.digests)
    assert {id(array) for array in jax.live_arrays()} <= before


def test_unshareable_memory_is_an_error_with_advice():
    with pytest.raises(
        EngineError, match="cuIpcGetMemHandle failed .* 201.*cuda_async.*transport=files"
    ):
        update(Fake(fails="cuIpcGetMemHandle"))


def test_without_a_driver_the_message_says_so(monkeypatch):
    def absent(place):
        raise OSError(place)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1.*transport=files"):
        update(None)


def in_this_process(address: int, nbytes: int):
    import torch

    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


@pytest.mark.parity
def test_the_engine_opens_what_the_trainer_named():
    from jaxmoe.vllm.plugin.ipc_memory import open_shared_tensors
    from jaxmoe.vllm.plugin.live_parameters import digest_tensor

    shared, fake = update(Fake()), Fake()
    info = SimpleNamespace(**json.loads(json.dumps(shared.update_info)))
    with open_shared_tensors(info, GPU, driver=fake, view=in_this_process) as tensors:
        assert {name: digest_tensor(tensor) for name, tensor in tensors} == shared.digests
        assert [list(tensor.shape) for _, tensor in tensors] == info.shapes
    calls = [call[:2] for call in fake.calls]
    opens = [base for name, base in calls if name == "cuIpcOpenMemHandle_v2"]
    assert len(set(opens)) == len(opens), "an allocation must be opened once"
    assert [base for name, base in calls if name == "cuIpcCloseMemHandle"] == opens
    assert {call[2] for call in fake.calls if call[0] == "cuIpcOpenMemHandle_v2"} == {1}


@pytest.mark.parity
def test_weights_on_another_gpu_are_refused():
    from jaxmoe.vllm.plugin.ipc_memory import open_shared_tensors
    from jaxmoe.vllm.plugin.manifest import UpdateRejected

    info = SimpleNamespace(**update(Fake()).update_info)
    with (
        pytest.raises(UpdateRejected, match=f"are on GPU {GPU}, vLLM runs on gpu-b"),
        open_shared_tensors(info, "gpu-b", driver=Fake(), view=in_this_process),
    ):
        pass
