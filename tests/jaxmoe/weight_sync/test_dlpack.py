# SPDX-License-Identifier: Apache-2.0
"""In process: what the mailbox yields is the checkpoint, and jax's own memory where it can be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weight_updates import sent_tensors

from jaxmoe.config import MeshConfig
from jaxmoe.model.params import map_specs
from jaxmoe.parallel.sharding import make_mesh, param_shardings
from jaxmoe.vllm.plugin import tensor_mailbox
from jaxmoe.weight_sync.checksum import digest_array
from jaxmoe.weight_sync.dlpack import share_in_process
from tests.jaxmoe.small_models import TEN_EXPERTS

CFG = replace(TEN_EXPERTS, n_layers=4)


def random_params(dtype: str = "float32"):
    rng = np.random.default_rng(0)
    return map_specs(lambda s: rng.standard_normal(s.shape, np.float32).astype(dtype), CFG)


def on_one(params):
    return jax.tree.map(jnp.asarray, params)


def cut(params):
    mesh = make_mesh(MeshConfig(fsdp=4, expert=2), jax.devices()[:8])
    assert mesh is not None
    return jax.device_put(params, param_shardings(CFG, mesh))


def test_the_mailbox_has_the_manifest_until_closing():
    with share_in_process(
        on_one(random_params()), CFG, dtype="float32", run="ab", version=7, mailbox=tensor_mailbox
    ) as update:
        assert update.update_info == {"mailbox": "ab:7"} and update.label == "ab:7"
        assert all(len(hexes) == 32 for hexes in update.digests.values())
    assert tensor_mailbox.pop_update("ab:7") is None


@pytest.mark.parity
@pytest.mark.parametrize("place", [on_one, cut, lambda params: params], ids=["one", "cut", "numpy"])
@pytest.mark.parametrize("stored_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sent", ["float32", "bfloat16"])
def test_tensors_are_the_checkpoints_bytes_in_its_order(place, stored_dtype, sent):
    from jaxmoe.vllm.plugin.live_parameters import digest_tensor

    params = random_params(stored_dtype)
    update = share_in_process(
        place(params), CFG, dtype=sent, run="ab", version=7, mailbox=tensor_mailbox
    )
    received = tensor_mailbox.pop_update("ab:7")
    assert received is not None and received[0] == update.manifest
    for (name, want), (actual_name, tensor) in zip(
        sent_tensors(params, CFG, sent), received[1], strict=True
    ):
        assert (actual_name, str(tensor.dtype)) == (name, f"torch.{want.dtype}")
        assert tuple(tensor.shape) == want.shape
        assert digest_tensor(tensor) == digest_array(want) == update.digests[name], name


@pytest.mark.parity
def test_arrays_except_gate_and_up_are_views():
    params = on_one(random_params())
    share_in_process(params, CFG, dtype="float32", run="ab", version=7, mailbox=tensor_mailbox)
    begin = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(params)}
    received = tensor_mailbox.pop_update("ab:7")
    assert received is not None
    copied = {
        name.rpartition(".")[2]
        for name, tensor in received[1]
        if not any(start <= tensor.data_ptr() < start + n for start, n in begin.items())
    }
    assert copied == {"gate_up_proj", "gate_up_proj_bias"}
