# SPDX-License-Identifier: Apache-2.0
"""Experts sent in four bits: the released layout's bytes, and what the other side makes of them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from board import as_processes
from safetensors.numpy import load_file
from weight_updates import CFG, RUN, random_params, write_update

from jaxmoe.checkpoint.hf import iter_hf
from jaxmoe.checkpoint.mxfp4 import decode_blocks, decode_packed
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.tensor_files import DTYPES, planned_bytes
from jaxmoe.config import ModelConfig
from jaxmoe.model.config import gpt_oss_20b, to_hf
from jaxmoe.model.params import map_specs
from jaxmoe.vllm.plugin import manifest
from jaxmoe.vllm.plugin.names import checkpoint_shapes
from jaxmoe.weight_sync.checksum import digest_array
from jaxmoe.weight_sync.files import WeightFile, write_files
from jaxmoe.weight_sync.sent_tensors import (
    PackedPart,
    device_sent,
    list_sent,
    plan_sent,
    sent_dtype,
)
from jaxmoe.weight_sync.sharded_files import write_sharded_files
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

PACKABLE = replace(CFG, d_model=64, d_expert=128)
PARAMS, _ = pack_experts(random_params(PACKABLE), PACKABLE)


def write_packed(directory, params=PARAMS, version=3, **options) -> WeightFile:
    return write_files(
        params,
        PACKABLE,
        directory,
        dtype="bfloat16",
        run=RUN,
        version=version,
        experts="packed",
        **options,
    )


def expected_tensors() -> dict[str, np.ndarray]:
    """Blocks and scales as an export has them, all other tensors as they are sent anyway."""
    expected = {name: x for name, x in iter_hf(PARAMS, PACKABLE, "mxfp4") if x.dtype == np.uint8}
    exact = dict(iter_hf(PARAMS, PACKABLE, "float32"))
    for entry in list_sent(PACKABLE, "packed"):
        if not isinstance(entry, PackedPart):
            dtype = DTYPES[plan_sent(entry, "bfloat16")[1]]
            expected[entry.name] = exact[entry.name].astype(dtype)
    return expected


@pytest.mark.parametrize("place", [lambda x: x, jnp.asarray], ids=["numpy", "jax"])
def test_the_file_equals_an_export_with_digests(tmp_path, place):
    update = write_packed(tmp_path, jax.tree.map(place, PARAMS))
    file = load_file(Path(update.update_info["path"]) / "model.safetensors")
    expected = expected_tensors()
    assert file.keys() == expected.keys() == update.digests.keys()
    assert sum(name.endswith(("_blocks", "_scales")) for name in file) == 4 * PACKABLE.n_layers
    for name, array in expected.items():
        assert file[name].tobytes() == array.tobytes() and file[name].shape == array.shape, name
        assert update.digests[name] == digest_array(array), name


def test_a_device_makes_the_hosts_bytes():
    params, device = jax.tree.map(jnp.asarray, PARAMS), jax.devices()[0]
    expected = expected_tensors()
    for entry in list_sent(PACKABLE, "packed"):
        sent = np.asarray(device_sent(params, entry, "bfloat16", device))
        assert sent.shape == entry.shape and str(sent.dtype) == sent_dtype(entry, "bfloat16")
        assert sent.tobytes() == expected[entry.name].tobytes(), entry.name


def test_several_processes_write_what_one_does(tmp_path):
    updates = as_processes(
        3,
        lambda channel: write_sharded_files(
            PARAMS,
            PACKABLE,
            tmp_path / "shared",
            dtype="bfloat16",
            run=RUN,
            version=3,
            channel=channel,
            experts="packed",
        ),
    )
    assert all(u.manifest == write_packed(tmp_path / "alone").manifest for u in updates)
    folder = Path(updates[0].update_info["path"])
    manifest.check_file_headers(manifest.read_manifest(folder), folder)


def test_dense_experts_are_not_sent_as_packed(tmp_path):
    with pytest.raises(ValueError, match="down_proj_blocks needs packed experts"):
        write_packed(tmp_path, random_params(PACKABLE))
    assert not [*tmp_path.rglob("*.safetensors")]


# What vLLM's process does before it loads anything, without jax and without torch.
RECEIVER = """
import json, sys
from pathlib import Path
import numpy as np
from jaxmoe.vllm.plugin import manifest
from jaxmoe.vllm.plugin.names import checkpoint_shapes
from jaxmoe.weight_sync.checksum import digest_array

folder, model = Path(sys.argv[1]), json.loads(sys.argv[2])
manifest.check_folder_owner(folder)
expected = manifest.read_manifest(folder)
manifest.check_tensor_shapes(expected, checkpoint_shapes(model, packed=True))
spans = manifest.check_file_headers(expected, folder)
wrong = [
    name for name, span in spans.items()
    if digest_array(np.fromfile(span.path, np.uint8, span.end - span.begin, offset=span.begin))
    != expected.tensors[name].digest
]
assert "jax" not in sys.modules
print(json.dumps({"bytes": sum(s.end - s.begin for s in spans.values()), "wrong": wrong}))
"""


def receive(folder, cfg: ModelConfig):
    arguments = [str(folder), json.dumps(to_hf(cfg, dtype="bfloat16"))]
    return subprocess.run(
        [sys.executable, "-c", RECEIVER, *arguments], capture_output=True, text=True
    )


def test_another_process_detects_any_changed_packed_bit(tmp_path):
    folder = Path(write_packed(tmp_path).update_info["path"])
    process = receive(folder, PACKABLE)
    assert process.returncode == 0, process.stderr
    expected = sum(planned_bytes(plan_sent(e, "bfloat16")) for e in list_sent(PACKABLE, "packed"))
    assert json.loads(process.stdout) == {"bytes": expected, "wrong": []}
    spans = manifest.check_file_headers(manifest.read_manifest(folder), folder)
    names = [name for name in spans if name.endswith(("_blocks", "_scales"))][:2]
    with open(folder / "model.safetensors", "r+b") as file:
        for name in names:
            file.seek(spans[name].end - 1)
            last = file.read(1)[0]
            file.seek(spans[name].end - 1)
            file.write(bytes([last ^ 16]))
    assert json.loads(receive(folder, PACKABLE).stdout)["wrong"] == names


def test_another_models_packed_update_is_rejected_by_name(tmp_path):
    process = receive(write_packed(tmp_path).update_info["path"], replace(PACKABLE, d_expert=64))
    line = process.stderr.splitlines()[-1]
    assert process.returncode == 1 and "gate_up_proj_blocks must be [10, 128, 2, 16]" in line


@pytest.mark.parametrize(("end", "dtype"), [("_blocks", "F32"), ("_bias", "U8")])
def test_bytes_for_numbers_and_numbers_for_bytes_fail(tmp_path, end, dtype):
    raw = write_packed(tmp_path).manifest
    name = next(name for name in raw["tensors"] if name.endswith(f"gate_up_proj{end}"))
    raw["tensors"][name]["dtype"] = dtype
    shapes = checkpoint_shapes(to_hf(PACKABLE, dtype="bfloat16"), packed=True)
    with pytest.raises(manifest.UpdateRejected, match=f"{name} must be .*, got {dtype}"):
        manifest.check_tensor_shapes(manifest.parse_manifest(raw, "here"), shapes)


def test_packed_20b_syncs_are_a_third_of_bfloat16():
    """Experts 0.2656 of bfloat16's bytes; all tensors 0.329: embedding, head and attention are not
    rounded, and are a tenth of the weights."""
    cfg = gpt_oss_20b()
    nbytes = {
        experts: {e.name: planned_bytes(plan_sent(e, "bfloat16")) for e in list_sent(cfg, experts)}
        for experts in ("packed", "dense")
    }
    in_experts = {
        experts: sum(n for name, n in sizes.items() if "experts" in name and "bias" not in name)
        for experts, sizes in nbytes.items()
    }
    assert in_experts["packed"] / in_experts["dense"] == 4.25 / 16 <= 0.30
    total = {experts: sum(sizes.values()) for experts, sizes in nbytes.items()}
    print(in_experts, total, total["packed"] / total["dense"])
    assert 0.30 < total["packed"] / total["dense"] < 0.335


def test_packed_bytes_decode_to_a_dense_updates_values(tmp_path):
    dense = map_specs(
        lambda _, x: decode_packed(x) if isinstance(x, Mxfp4) else x, PACKABLE, PARAMS
    )
    file = load_file(Path(write_packed(tmp_path / "a").update_info["path"]) / "model.safetensors")
    update = write_update(dense, tmp_path / "b", dtype="float32", cfg=PACKABLE)
    values = load_file(Path(update.update_info["path"]) / "model.safetensors")
    for name in (n for n in values if n.endswith(("experts.gate_up_proj", "experts.down_proj"))):
        decoded = decode_blocks(file[name + "_blocks"], file[name + "_scales"]).swapaxes(1, 2)
        np.testing.assert_array_equal(decoded, values[name])
