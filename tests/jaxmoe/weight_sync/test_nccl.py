# SPDX-License-Identifier: Apache-2.0
"""NCCL's calls as vLLM's engine expects them, by a library that writes them down; no GPU."""

import base64
import ctypes
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from weight_updates import sent_tensors, travels_as

from jaxmoe.checkpoint.hf import iter_hf
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.model.params import map_specs
from jaxmoe.weight_sync.checksum import digest_array
from jaxmoe.weight_sync.nccl import NcclGroup, broadcast_weights
from tests.jaxmoe.small_models import TEN_EXPERTS

CFG = TEN_EXPERTS
ID = bytes(range(128))
NUMPY = {1: np.dtype(np.uint8), 7: np.dtype(np.float32), 9: np.dtype(ml_dtypes.bfloat16)}


class Fake:
    """Both libraries; `calls` in order, a broadcast with the bytes that lay at its pointer."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple] = []
        self.fails = fails
        self.ncclGetErrorString = lambda code: b"unhandled system error"

    def status(self, name: str) -> int:
        return 2 if name == self.fails else 0

    def ncclGetUniqueId(self, out):
        ctypes.memmove(out, ID, 128)
        return self.status("ncclGetUniqueId")

    def ncclCommInitRank(self, out, size, unique, rank):
        out._obj.value = 4711
        self.calls.append(("init", size.value, bytes(unique.internal), rank.value))
        return self.status("ncclCommInitRank")

    def ncclAllReduce(self, send, receive, count, kind, operation, communicator, stream):
        self.calls.append(
            ("sum", count.value, kind.value, operation.value, communicator.value, stream)
        )
        return self.status("ncclAllReduce")

    def ncclBroadcast(self, send, receive, count, kind, root, communicator, stream):
        assert send.value == receive.value
        data = ctypes.string_at(send.value, count.value * NUMPY[kind.value].itemsize)
        self.calls.append(("broadcast", kind.value, root.value, communicator.value, stream, data))
        return self.status("ncclBroadcast")

    def ncclCommAbort(self, communicator):
        self.calls.append(("abort", communicator.value))
        return 0

    def cudaSetDevice(self, number):
        self.calls.append(("device", number.value))
        return 0

    def cudaStreamSynchronize(self, stream):
        self.calls.append(("wait", stream))
        return self.status("cudaStreamSynchronize")


def random_params(dtype: str = "float32"):
    rng = np.random.default_rng(0)
    return map_specs(
        lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32).astype(dtype)), CFG
    )


def joined(fake: Fake, workers: int = 2) -> NcclGroup:
    group = NcclGroup(workers, nccl=fake, cudart=fake)
    group.join()
    return group


def test_vllm_gets_the_unique_id_and_rank_offset():
    info = NcclGroup(3, nccl=Fake(), cudart=Fake()).init_info
    assert base64.b64decode(info.pop("nccl_unique_id_b64"), validate=True) == ID
    assert info == {"rank_offset": 1, "world_size": 4, "packed": False}


def test_joining_is_rank_0_and_sums_one_float32():
    fake = Fake()
    joined(fake)
    assert fake.calls == [
        ("device", 0),
        ("init", 3, ID, 0),
        ("sum", 1, 7, 0, 4711, None),
        ("wait", None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stored_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("sent", "kind"), [("float32", 7), ("bfloat16", 9)])
def test_tensors_are_broadcast_in_the_announced_order(stored_dtype, sent, kind):
    fake, params = Fake(), random_params(stored_dtype)
    update = broadcast_weights(joined(fake), params, CFG, dtype=sent, run="ab", version=5)
    assert len(fake.calls) == 4, "nothing moves before send()"
    update.send()
    sends = [call for call in fake.calls if call[0] == "broadcast"]
    assert [call[1:5] for call in sends] == [
        (kind if travels_as(name, sent) == sent else 7, 0, 4711, None) for name in update.digests
    ]
    info = update.update_info
    assert info["manifest"] == update.manifest and update.label == "ab:5"
    for (name, want), *announced, call in zip(
        sent_tensors(params, CFG, sent),
        info["names"],
        info["dtype_names"],
        info["shapes"],
        sends,
        strict=True,
    ):
        assert announced == [name, str(want.dtype), list(want.shape)]
        assert call[-1] == want.tobytes(), name
        assert update.digests[name] == digest_array(want), name


def test_experts_in_four_bits_are_broadcast_as_bytes():
    cfg, fake = replace(CFG, d_model=64, d_expert=128), Fake()
    rng = np.random.default_rng(0)
    dense = map_specs(lambda s: rng.standard_normal(s.shape, np.float32), cfg)
    params, _ = pack_experts(dense, cfg)
    update = broadcast_weights(
        joined(fake), params, cfg, dtype="bfloat16", run="ab", version=5, experts="packed"
    )
    update.send()
    info, sends = update.update_info, [call for call in fake.calls if call[0] == "broadcast"]
    packed = {n: x for n, x in iter_hf(params, cfg, "mxfp4") if x.dtype == np.uint8}
    for name, dtype, shape, call in zip(
        info["names"], info["dtype_names"], info["shapes"], sends, strict=True
    ):
        assert (name in packed) == (dtype == "uint8") == (call[1] == 1)
        if name in packed:
            assert shape == list(packed[name].shape) and call[-1] == packed[name].tobytes()
            assert update.digests[name] == digest_array(packed[name])
    assert packed and packed.keys() <= {*info["names"]}


def test_broadcasts_finish_before_their_memory_is_freed():
    fake = Fake()
    group = joined(fake)
    broadcast_weights(group, random_params(), CFG, dtype="float32", run="ab", version=5).send()
    kinds = [call[0] for call in fake.calls[4:]]
    assert kinds == ["device", "broadcast", "wait"] * (len(kinds) // 3) and len(kinds) > 90


def test_arrays_are_sent_from_the_groups_device():
    fake, device = Fake(), jax.local_devices()[3]
    group = NcclGroup(1, device=device, nccl=fake, cudart=fake)
    group.join()
    broadcast_weights(group, random_params(), CFG, dtype="float32", run="ab", version=5).send()
    assert {call for call in fake.calls if call[0] == "device"} == {
        ("device", device.local_hardware_id)
    }


@pytest.mark.parametrize("name", ["ncclCommInitRank", "ncclAllReduce", "ncclBroadcast"])
def test_an_nccl_error_is_named_with_advice(name):
    fake = Fake(fails=name)
    with pytest.raises(
        EngineError, match=f"{name} failed: unhandled system error.*transport=files"
    ):
        joined(fake).send(jnp.zeros(3))


def test_an_error_of_cuda_is_named():
    with pytest.raises(EngineError, match="cudaStreamSynchronize failed with CUDA error 2"):
        joined(Fake(fails="cudaStreamSynchronize"))


def test_nothing_is_sent_before_the_group_is_joined():
    with pytest.raises(EngineError, match=r"call join\(\)"):
        NcclGroup(1, nccl=Fake(), cudart=Fake()).send(jnp.zeros(3))


def test_leaving_twice_is_leaving_once():
    fake = Fake()
    group = joined(fake)
    group.close()
    group.close()
    assert fake.calls[4:] == [("abort", 4711)]


def test_a_missing_nccl_library_is_named_with_advice(monkeypatch):
    def absent(place):
        raise OSError(place)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(ConfigError, match=r"libnccl\.so\.2.*jax\[cuda13\].*transport=files"):
        NcclGroup(1, cudart=Fake())


def test_a_group_needs_a_worker():
    with pytest.raises(ConfigError, match="at least one process of vLLM, got 0"):
        NcclGroup(0, nccl=Fake(), cudart=Fake())
